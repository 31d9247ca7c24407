"""A stand-in, in plain PyTorch, for the CPU kernels of SGLang 0.5.23, so that the real engine runs without a GPU.

SGLang's CPU kernels exist as C++ source only; PyPI's `sglang-kernel` is a CUDA build. With this package in their
place (and SGLANG_USE_CPU_ENGINE=1), attention over the paged cache, the bookkeeping of cache slots, and the
building and greedy verification of the draft tree are ours, while everything else is SGLang's own code: the
models and their loaders, the capture of aux states, the EAGLE worker, the scheduler, the memory pools, the
sampler and the server. Made for small models: requests are looped over.

`convert_weight_packed` must stay undefined: without it SGLang takes its own PyTorch code for norms,
activations, RoPE and linear layers, on every CPU alike.

Letters in shapes: R requests of the batch, P rows of the table of cache slots (`req_to_token` [P, W], one row a
request, W positions), S slots of the cache, T tokens, N and G query and key heads, H head width, K topk, J draft
steps, Q tokens to verify (bonus and drafts).
"""

from sgl_kernel import attention
from sgl_kernel.slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
)
from sgl_kernel.tree import (
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__version__ = "0.5.23"
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "attention",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
