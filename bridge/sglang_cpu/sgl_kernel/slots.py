"""Which cache slot holds which token: reading and writing the table `req_to_token` [P, W] of slots."""

import ctypes

import numpy as np
import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """Write slots into the table: request r gets its next end - start of them at positions start .. end.

    req_pool_indices, start_offset, end_offset   R   the table's row, and the positions
    out_cache_loc                                T   slots of all requests, one after the other
    """
    rows, positions = _ranges(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, positions] = out_cache_loc[: len(rows)].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """The reverse: read the slots at positions start .. end of each request into `out_cache_loc` [T]."""
    rows, positions = _ranges(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: len(rows)] = req_to_token[rows, positions].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """Read the K*J slots after each request's last token into `out_cache_loc` [R*K*J]: the draft's scratch."""
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_steps, out_cache_loc, pool_len
    )


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """A table [R*K, W] for drafting: row r*K + k shows the request's tokens, then the J scratch slots of branch k.

    A branch of the beam keeps its own slots for all steps; they do not follow the token's ancestors.
    """
    table = req_to_token[req_pool_indices.long()].repeat_interleave(topk, dim=0)
    for row, (length, k) in enumerate((n, k) for n in seq_lens.tolist() for k in range(topk)):
        scratch = length + k * num_steps
        table[row, length : length + num_steps] = table[row, scratch : scratch + num_steps].clone()
    return table


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copy slots `src_loc` [T] over slots `tgt_loc` [T] in every buffer; all are read before any is written.

    data_ptrs, strides   address of each layer's keys or values, and the bytes of one slot
    """
    source, goal = src_loc.numpy(), tgt_loc.numpy()
    slots = 1 + int(max(source.max(initial=-1), goal.max(initial=-1)))
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * size)).from_address(address)
        buffer = np.frombuffer(memory, np.uint8).reshape(slots, size)
        buffer[goal] = buffer[source]


def _ranges(rows_R, start_R, end_R):
    """Row and position of every table entry in rows[r], start[r] .. end[r], one request after the other."""
    counts = (end_R - start_R).long()
    first = counts.cumsum(0) - counts
    within = torch.arange(int(counts.sum())) - first.repeat_interleave(counts)
    return rows_R.long().repeat_interleave(counts), start_R.long().repeat_interleave(counts) + within
