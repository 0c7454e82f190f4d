"""How every method is made of its options; apart from the registry, because whoever makes one needs torch."""

from __future__ import annotations

from collections.abc import Callable

from marsbench.decoding.engine import Method
from marsbench.decoding.outside import OutsideMethod
from marsbench.methods.ar import Autoregressive
from marsbench.methods.block_diffusion import BlockDiffusion
from marsbench.methods.hugging_face import HfAssisted, HfGenerate
from marsbench.methods.jacobi import Jacobi
from marsbench.methods.mars import Mars
from marsbench.methods.mars_block_cache import MarsBlockCache
from marsbench.methods.mars_lookup import MarsLookup
from marsbench.methods.mars_no_cache import MarsNoCache
from marsbench.methods.mars_speculative import MarsSpeculative
from marsbench.methods.mars_verified import MarsVerified
from marsbench.methods.medusa import Medusa
from marsbench.methods.prompt_lookup import PromptLookup
from marsbench.methods.registry import Options
from marsbench.methods.speculative import Drafter, Speculative


def _mask(options: Options) -> int:
    assert options.mask_id is not None, "checked by build_method"
    return options.mask_id


def _drafter(options: Options) -> Drafter:
    mars = options.draft_method == "mars"
    method: Method = Mars(_mask(options), options.block_size) if mars else Autoregressive()
    return Drafter(options.draft, method, options.draft_threshold if mars else None, options.draft_length)


BUILDERS: dict[str, Callable[[Options], Method | OutsideMethod]] = {
    "ar": lambda o: Autoregressive(),
    "mars": lambda o: Mars(_mask(o), o.block_size, o.metric),
    "mars-no-cache": lambda o: MarsNoCache(_mask(o), o.block_size, o.metric, o.appended_masks),
    "mars-block-cache": lambda o: MarsBlockCache(_mask(o), o.cache_block, o.metric),
    "mars-verified": lambda o: MarsVerified(_mask(o), o.block_size, o.metric, o.layout),
    "mars-lookup": lambda o: MarsLookup(_mask(o), o.block_size, o.metric, o.layout, o.draft_length),
    "speculative": lambda o: Speculative(_drafter(o)),
    "mars-speculative": lambda o: MarsSpeculative(_drafter(o), _mask(o), o.block_size, o.metric),
    "medusa": lambda o: Medusa(o.heads, len(o.heads), o.tree_width),
    "jacobi": lambda o: Jacobi(o.block_size),
    "prompt-lookup": lambda o: PromptLookup(o.draft_length),
    "block-diffusion": lambda o: BlockDiffusion(_mask(o), o.block_size, o.metric),
    "hf-generate": lambda o: HfGenerate(),
    "hf-assisted": lambda o: HfAssisted(o.draft, o.draft_length),
}
