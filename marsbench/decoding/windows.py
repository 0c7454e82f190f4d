"""The window layouts that methods put their guesses in: a line, a tree, or a line with groups of masks.

In every window a row's last committed token stands at the same entry, `last(rows)`. So what stands where, and who sees
whom, is the same for all rows, and is worked out once for every shape that recurs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from marsbench.decoding.rows import Rows
from marsbench.forward.window import Window, kept


def pending(rows: Rows) -> Tensor:
    """How many committed tokens of each row are not cached yet, [N]; every window begins with them."""
    return rows.length - rows.cached


def last(rows: Rows) -> int:
    """The entry of each row's last committed token in a window; what a method adds comes right behind it."""
    return rows.extent.pending - 1


def drafts_of(rows: Rows) -> Tensor:
    """The drafts [N, D], as many columns as the row with the most has."""
    return rows.drafts[:, : rows.extent.drafted]


def linear_window(rows: Rows, *, masks: int = 0, mask_id: int = -1, each: Tensor | None = None) -> Window:
    """The committed tokens that are not cached yet, the row's drafts, and `masks` masks; plain causal attention.

    A row with fewer pending tokens than others begins with fillers, one with fewer drafts ends with them; so does one
    whose masks, `each` [N], are fewer than `masks`.
    """
    drafts = drafts_of(rows)
    begin = rows.length - rows.extent.pending
    offset = _range(rows.extent.pending + drafts.shape[1] + masks, begin.device)
    position = begin.unsqueeze(1) + offset
    input_ids = rows.tokens.gather(1, position.clamp(0, rows.tokens.shape[1] - 1))
    if masks:
        input_ids[:, rows.extent.pending :] = mask_id
    if drafts.shape[1]:
        ours = _range(drafts.shape[1], begin.device) < rows.drafted.unsqueeze(1)
        place = input_ids[:, rows.extent.pending :][:, : drafts.shape[1]]
        place.copy_(torch.where(ours, drafts, place))
    real = None
    if not rows.extent.even or each is not None:
        real = position >= rows.cached.unsqueeze(1)
        real &= offset < (rows.extent.pending + (masks if each is None else each) + rows.drafted).unsqueeze(1)
    slots = rows.extent.length - rows.extent.pending + len(offset)
    visible = causal(len(offset), begin.device)
    if not masks:
        return Window(input_ids, position, begin, slots, visible, real)
    masks_begin = rows.extent.pending + rows.drafted if drafts.shape[1] else rows.extent.pending
    return Window(input_ids, position, begin, slots, visible, real, masks_begin)


def tree_window(rows: Rows, depth: Tensor, ancestors: Tensor) -> Window:
    """`linear_window` whose drafts are a tree's nodes, of `depth` [M] from 0; each sees its `ancestors` bool [M, M]."""
    line = linear_window(rows)
    if not rows.extent.drafted:
        return line
    tokens = rows.extent.pending
    line.position[:, tokens:] = rows.length.unsqueeze(1) + depth
    visible = line.visible.clone()
    visible[tokens:, tokens:] = ancestors
    return line._replace(visible=visible)


def grouped_window(
    rows: Rows, group: int, mask_id: int, count: int | None = None, stands: Tensor | None = None
) -> Window:
    """`linear_window` of the drafts, and behind it a group of `group` masks for every place where they may end.

    Group j, from 0 to the number of the row's drafts, sees the prefix, the first j drafts and itself, causally; its
    positions go on from draft j as if the masks stood there. Nothing else sees it. There are the first `count` of these
    groups, or all; where `stands` [N, count] is False, fillers stand in place of the group.
    """
    line, drafts = linear_window(rows), rows.extent.drafted
    count = drafts + 1 if count is None else count
    tokens = rows.extent.pending
    line_width = tokens + drafts
    of_group, in_group, visible = _groups(line_width + count * group, line_width, tokens, group, rows.length.device)
    masks = line.input_ids.new_full((len(rows), len(of_group)), mask_id)
    real = line.real
    if real is not None or stands is not None:
        ours = of_group <= rows.drafted.unsqueeze(1)
        line_real = torch.ones_like(line.input_ids, dtype=torch.bool) if real is None else real
        real = torch.cat([line_real, ours if stands is None else ours & stands[:, of_group]], dim=1)
    return Window(
        torch.cat([line.input_ids, masks], dim=1),
        torch.cat([line.position, rows.length.unsqueeze(1) + (of_group + in_group)], dim=1), line.begin,
        line.slots + len(of_group), visible, real, rows.extent.pending + drafts,
    )  # fmt: skip


def group_entries(rows: Rows, group: int, chosen: Tensor) -> Tensor:
    """The entries [N, group] of mask group `chosen` [N] in a `grouped_window`."""
    first = rows.extent.pending + rows.extent.drafted
    return (first + chosen * group).unsqueeze(1) + _range(group, chosen.device)


def leading_windows(rows: Rows) -> Iterator[Window]:
    """Causal windows over a long prompt's beginning, each to be forwarded before the next; the last piece is left."""
    while rows.extent.pending > rows.prefill_positions:
        begin, width = rows.cached, rows.prefill_positions
        position = begin.unsqueeze(1) + torch.arange(width, device=begin.device)
        slots = rows.extent.length - rows.extent.pending + width
        yield Window(rows.tokens.gather(1, position), position, begin, slots, causal(width, begin.device))
        rows.cached = begin + width
        rows.extent = rows.extent._replace(pending=rows.extent.pending - width)


@kept
def causal(width: int, device: torch.device) -> Tensor:
    """Every entry sees itself and those before it, bool [width, width]."""
    return torch.ones(width, width, dtype=torch.bool, device=device).tril_()


@kept
def _range(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


@kept
def _groups(width: int, line: int, tokens: int, group: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For groups of masks behind a line of `tokens` and drafts: each mask's group, its place there, who sees whom."""
    count = (width - line) // group if group else 0
    of_group = torch.arange(count, device=device).repeat_interleave(group)  # [M]
    in_group = torch.arange(group, device=device).repeat(count)  # [M]
    visible = torch.zeros(line + len(of_group), line + len(of_group), dtype=torch.bool, device=device)
    visible[:line, :line] = causal(line, device)
    visible[line:, :line] = torch.arange(line, device=device) < tokens + of_group.unsqueeze(1)
    same = of_group == of_group.unsqueeze(1)
    visible[line:, line:] = same & (in_group <= in_group.unsqueeze(1))
    return of_group, in_group, visible
