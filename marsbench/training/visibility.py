"""Who may attend to whom while training: the two-stream attention patterns of MARS and of block diffusion.

A training sequence enters the model twice: the *clean* stream holds the tokens as they are, the *noisy* stream holds
masks in place of response tokens, with the same position ids. Blocks of B tokens are counted over the whole sequence,
as the authors' code does (`blocks_of_sequence`), or over each response by itself, as the paper describes them
(`blocks_of_responses`). The noisy stream may be cut down to the tokens that need it (`needs_noisy_copy`): the clean
copy of a token that looks the same in both stands in for it.
"""

import torch
from torch import Tensor

from marsbench.forward.window import ALIGNED


def blocks_of_sequence(response: Tensor, block_size: int) -> Tensor:
    """Which block each token of `response` [N, L] is in, integer [N, L]; the first begins with the sequence."""
    return torch.arange(response.shape[1], device=response.device).expand(response.shape) // block_size


def blocks_of_responses(response: Tensor, block_size: int, ahead: Tensor | int = 0) -> Tensor:
    """Blocks of a sequence, where the first of every response begins with the response's first token.

    A prompt is a block of its own, however long; so no block holds tokens of both kinds. `response`, bool [N, L], marks
    the tokens of responses, `block_size` is B in tokens, and `ahead`, integer [N, 1] below B, says by how many tokens
    each row's first block of a response is shorter. Returns integer [N, L], from 0, never falling along a row.
    """
    place = torch.arange(response.shape[1], device=response.device)
    turns = response != response.roll(1, 1)
    turns[:, 0] = True
    turn_begin = place.where(turns, 0).cummax(1).values
    begins = turns | (response & ((place - turn_begin + ahead) % block_size == 0))
    return begins.cumsum(1) - 1


def stream_visibility(
    position: Tensor, block: Tensor, noisy: Tensor, stands_in: Tensor, *, bidirectional: bool = False
) -> Tensor:
    """Visibility between the entries of a two-stream sequence (paper section 3.2; BD3-LM for the bidirectional one).

    Of each entry, [..., S]: its `position` id and its `block`, integer, whether it is of the `noisy` stream, bool, and
    whether it `stands_in` for both, as a clean entry without a noisy copy does. `bidirectional` lets entries of one
    block and stream see each other both ways. Returns bool [..., S (query), S (key)], True where the query may attend
    to the key.
    """
    query_block, key_block = block.unsqueeze(-1), block.unsqueeze(-2)
    query_noisy, key_noisy = noisy.unsqueeze(-1), noisy.unsqueeze(-2)
    same_block, earlier_block = query_block == key_block, key_block < query_block
    in_order = position.unsqueeze(-2) <= position.unsqueeze(-1)
    within = same_block if bidirectional else same_block & in_order
    clean_to_clean = ~query_noisy & ~key_noisy & (earlier_block | within)
    noisy_to_clean = query_noisy & ~key_noisy & (earlier_block | (within & stands_in.unsqueeze(-2)))
    noisy_to_noisy = query_noisy & key_noisy & within
    return clean_to_clean | noisy_to_clean | noisy_to_noisy


def needs_noisy_copy(response: Tensor, block: Tensor, *, bidirectional: bool = False) -> Tensor:
    """Which tokens look different in the noisy stream, so that it must hold a copy of them, bool [N, L].

    A token does when it is masked itself or can see a mask of its own block. `response`, bool [N, L], marks the tokens
    that the noisy stream masks, `block`, integer [N, L], never falls along a row, and `bidirectional` says whether a
    token also sees later tokens of its block.
    """
    copied = block.where(response, -1).cummax(1).values == block
    if bidirectional:
        beyond = torch.iinfo(block.dtype).max
        copied |= block.where(response, beyond).flip(1).cummin(1).values.flip(1) == block
    return copied


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A float attention mask [N, 1, Q, K] from bool [N, Q, K], in autocast's dtype, its rows aligned on a GPU."""
    device = visible.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    keys = visible.shape[-1]
    room = keys if device == "cpu" else keys + -keys % ALIGNED
    mask = torch.zeros(*visible.shape[:-1], room, dtype=dtype, device=visible.device)[..., :keys]
    return mask.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)
