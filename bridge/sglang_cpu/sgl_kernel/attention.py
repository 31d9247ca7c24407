"""Attention over the paged cache, registered as torch.ops.sgl_kernel.{extend,decode}_attention_cpu."""

import torch

# Positional, in the order in which SGLang's CPU attention backend calls them.
EXTEND = """extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) out, Tensor keys, Tensor values,
float key_scale, float value_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens,
Tensor extend_seq_lens, Tensor extend_start_loc, int longest, float scale, float logit_cap, bool is_cross,
int window, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool is_causal) -> ()"""
DECODE = """decode_attention_cpu(Tensor q, Tensor(a!) keys, Tensor(b!) values, float key_scale, float value_scale,
Tensor(c!) out, Tensor? k, Tensor? v, Tensor? loc, Tensor workspace, Tensor req_to_token, Tensor req_pool_indices,
Tensor seq_lens, float scale, float logit_cap, bool is_cross, int window, Tensor? encoder_lens,
Tensor? sinks) -> ()"""


def extend(
    q, k, v, out, keys, values, key_scale, value_scale, req_to_token, req_pool_indices, seq_lens, extend_seq_lens,
    extend_start_loc, longest, scale, logit_cap, is_cross, window, encoder_lens, sinks, tree_mask, is_causal,
) -> None:  # fmt: skip
    """The last `extend_seq_lens[r]` of each request's `seq_lens[r]` tokens attend over all of them.

    q, out            T N H   new tokens of all requests, one after the other from `extend_start_loc` [R] on
    k, v              T G H   their keys and values (or T G*H); None: they are in the cache already
    keys, values      S G H   the cache; token i of request r lies in slot req_to_token[req_pool_indices[r], i]
    tree_mask         R*Q*Q   which new token sees which new token, where they form a tree; None: causal
    """
    _plain(key_scale, value_scale, logit_cap, is_cross, encoder_lens, sinks)
    for r, (row, total, count, start) in enumerate(
        zip(
            *(x.tolist() for x in (req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc)),
            strict=True,
        )
    ):
        slots, before = req_to_token[row, :total].long(), total - count
        all_keys, all_values = keys[slots], values[slots]
        if k is not None:
            all_keys[before:] = k[start : start + count].view(count, *keys.shape[1:])
            all_values[before:] = v[start : start + count].view(count, *values.shape[1:])
        seen = torch.ones(count, total, dtype=torch.bool)
        if tree_mask is not None:
            seen[:, before:] = tree_mask.view(-1, count, count)[r]
        elif is_causal:
            seen = seen.tril(before)
        out[start : start + count] = _attend(
            q[start : start + count], all_keys, all_values, _near(seen, window), scale
        )


def decode(
    q, keys, values, key_scale, value_scale, out, k, v, loc, workspace, req_to_token, req_pool_indices, seq_lens,
    scale, logit_cap, is_cross, window, encoder_lens, sinks,
) -> None:  # fmt: skip
    """Store one new token per request, then let it attend over the request's `seq_lens[r]` tokens.

    q, out            R N H
    k, v              R G H   keys and values to store in slots `loc` [R]; None: they are in the cache already
    keys, values      S G H   the cache, addressed as in `extend`
    """
    _plain(key_scale, value_scale, logit_cap, is_cross, encoder_lens, sinks)
    if k is not None:
        keys[loc] = k.view(-1, *keys.shape[1:]).to(keys.dtype)
        values[loc] = v.view(-1, *values.shape[1:]).to(values.dtype)
    for r, (row, total) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, :total].long()
        seen = _near(torch.ones(1, total, dtype=torch.bool), window)
        out[r : r + 1] = _attend(q[r : r + 1], keys[slots], values[slots], seen, scale)


def _attend(q_TNH, k_SGH, v_SGH, seen_TS, scale: float):
    """Softmax attention with grouped heads, in float32; [T, N, H] in q's dtype."""
    group = q_TNH.shape[1] // k_SGH.shape[1]
    k_SNH, v_SNH = (x.float().repeat_interleave(group, dim=1) for x in (k_SGH, v_SGH))
    scores_NTS = torch.einsum("tnh,snh->nts", q_TNH.float(), k_SNH) * scale
    weights_NTS = scores_NTS.masked_fill(~seen_TS, -torch.inf).softmax(-1)
    return torch.einsum("nts,snh->tnh", weights_NTS, v_SNH).to(q_TNH.dtype)


def _near(seen_TS, window: int):
    """Only the last `window` keys up to each query's own; 0: all. The last query sits at the last key."""
    return seen_TS.triu(seen_TS.shape[1] - seen_TS.shape[0] - window + 1) if window > 0 else seen_TS


def _plain(key_scale, value_scale, logit_cap, is_cross, encoder_lens, sinks) -> None:
    extras = {
        "scales of a quantised cache": (key_scale, value_scale) != (1.0, 1.0),
        "logit_cap": logit_cap > 0,
        "cross attention": is_cross or encoder_lens is not None,
        "attention sinks": sinks is not None,
    }
    if asked := [name for name, wanted in extras.items() if wanted]:
        raise NotImplementedError(f"the stand-in for SGLang's CPU kernels does not do {asked[0]}")


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for schema, function in ((EXTEND, extend), (DECODE, decode)):
    _library.define(schema.replace("\n", " "))
    _library.impl(schema.partition("(")[0], function, "CPU")
