"""The stand-in for SGLang's CPU kernels against what each of them means, one token at a time."""

import json
import sys

import numpy as np
import pytest
import torch

from bridge import sglang

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 6, 24
SCALE = 0.4


@pytest.fixture(scope="module")
def kernels():
    sys.path.insert(0, str(sglang.STAND_IN))
    try:
        import sgl_kernel

        yield sgl_kernel
    finally:
        sys.path.remove(str(sglang.STAND_IN))


@pytest.fixture
def cache():
    """(table [3, WIDTH] of slots in no order, keys and values [S, G, H])."""
    rng = torch.Generator().manual_seed(1)
    slots = torch.randperm(3 * WIDTH, generator=rng).int().view(3, WIDTH)
    return slots, *(torch.randn(3 * WIDTH, KV_HEADS, HEAD_DIM, generator=rng) for _ in range(2))


def _one(q_NH, keys_SGH, values_SGH):
    """What one query gets from all of these keys."""
    out = []
    for n in range(HEADS):
        g = n // (HEADS // KV_HEADS)
        weights = torch.softmax(keys_SGH[:, g] @ q_NH[n] * SCALE, 0)
        out.append(weights @ values_SGH[:, g])
    return torch.stack(out)


def _extend(q, k, v, table, keys, values, rows, totals, counts, window=0, mask=None, causal=True):
    out, starts = torch.zeros_like(q), np.cumsum([0, *counts[:-1]]).tolist()
    torch.ops.sgl_kernel.extend_attention_cpu(
        q, k, v, out, keys, values, 1.0, 1.0, table, *map(torch.tensor, (rows, totals, counts, starts)), max(counts),
        SCALE, 0.0, False, window, None, None, mask, causal,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("window", [0, 3])
def test_new_tokens_attend_over_the_cache_and_themselves(kernels, cache, stored, window):
    table, keys, values = cache
    rows, totals, counts = [2, 0], [9, 4], [3, 4]
    q = torch.randn(7, HEADS, HEAD_DIM)
    k, v = None, None
    if not stored:  # the new tokens' keys come beside the cache, whose slots hold something else
        k, v = torch.randn(7, KV_HEADS * HEAD_DIM), torch.randn(7, KV_HEADS, HEAD_DIM)
    found, at = _extend(q, k, v, table, keys, values, rows, totals, counts, window), 0
    for row, total, count in zip(rows, totals, counts, strict=True):
        slots = table[row, :total].long()
        all_keys, all_values = keys[slots], values[slots]
        for i in range(count):
            if not stored:
                all_keys[total - count + i] = k[at].view(KV_HEADS, HEAD_DIM)
                all_values[total - count + i] = v[at]
            end = total - count + i + 1
            first = max(0, end - window) if window else 0
            torch.testing.assert_close(found[at], _one(q[at], all_keys[first:end], all_values[first:end]))
            at += 1


def test_nodes_of_a_tree_see_the_text_and_their_ancestors(kernels, cache):
    table, keys, values = cache
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    q = torch.randn(3, HEADS, HEAD_DIM)
    found = _extend(q, None, None, table, keys, values, [1], [8], [3], mask=mask.flatten())
    for i in range(3):
        seen = [*range(5), *(5 + j for j in range(3) if mask[i, j])]
        slots = table[1, seen].long()
        torch.testing.assert_close(found[i], _one(q[i], keys[slots], values[slots]))


def test_encoder_rows_see_all_new_tokens(kernels, cache):
    table, keys, values = cache
    q = torch.randn(3, HEADS, HEAD_DIM)
    found = _extend(q, None, None, table, keys, values, [1], [8], [3], causal=False)
    slots = table[1, :8].long()
    torch.testing.assert_close(found[0], _one(q[0], keys[slots], values[slots]))


@pytest.mark.parametrize("window", [0, 3])
def test_a_decoded_token_is_stored_and_attends(kernels, cache, window):
    table, keys, values = cache
    q, k, v = (torch.randn(2, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    totals, rows, out = [6, 2], [0, 2], torch.zeros(2, HEADS, HEAD_DIM)
    loc = torch.stack([table[row, total - 1] for row, total in zip(rows, totals, strict=True)]).long()
    torch.ops.sgl_kernel.decode_attention_cpu(
        q, keys, values, 1.0, 1.0, out, k, v, loc, torch.empty(0), table, torch.tensor(rows), torch.tensor(totals),
        SCALE, 0.0, False, window, None, None,
    )  # fmt: skip
    torch.testing.assert_close(keys[loc], k, rtol=0, atol=0)
    for r, (row, total) in enumerate(zip(rows, totals, strict=True)):
        slots = table[row, max(0, total - window) if window else 0 : total].long()
        torch.testing.assert_close(out[r], _one(q[r], keys[slots], values[slots]))


def test_what_is_not_covered_is_refused(kernels, cache):
    table, keys, values = cache
    q = torch.randn(1, HEADS, HEAD_DIM)
    arguments = [table, *map(torch.tensor, ([0], [1], [1], [0])), 1, SCALE]
    with pytest.raises(NotImplementedError, match="does not do logit_cap"):
        torch.ops.sgl_kernel.extend_attention_cpu(
            q,
            None,
            None,
            q.clone(),
            keys,
            values,
            1.0,
            1.0,
            *arguments,
            30.0,
            False,
            0,
            None,
            None,
            None,
            True,
        )
    with pytest.raises(NotImplementedError, match="MTP"):
        kernels.rotate_input_ids_cpu()


def test_sglang_does_not_take_the_stand_in_for_kernels_that_pack_weights(kernels):
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


def test_slots_are_written_read_and_shown_to_branches(kernels):
    table, rows = torch.zeros(3, 12, dtype=torch.int32), torch.tensor([2, 0])
    start, end = torch.tensor([1, 0]), torch.tensor([3, 4])
    kernels.assign_req_to_token_pool_cpu(rows, table, start, end, torch.arange(50, 56), 12)
    assert table[2].tolist() == [0, 50, 51] + [0] * 9
    assert table[0].tolist() == [52, 53, 54, 55] + [0] * 8
    out = torch.zeros(6, dtype=torch.int64)
    kernels.assign_extend_cache_locs_cpu(rows, table, start, end, out, 12)
    assert out.tolist() == [50, 51, 52, 53, 54, 55]

    table = torch.arange(36, dtype=torch.int32).view(3, 12)
    lengths, topk, steps = torch.tensor([4, 2]), 2, 3
    out = torch.zeros(12, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, out, 12, topk, steps)
    assert out.tolist() == [*range(28, 34), *range(2, 8)]
    branches = kernels.build_draft_decode_metadata_cpu(table, rows, lengths, topk, steps, 12)
    assert [b[: n + 3].tolist() for b, n in zip(branches, (4, 4, 2, 2), strict=True)] == [
        [24, 25, 26, 27, 28, 29, 30],
        [24, 25, 26, 27, 31, 32, 33],
        [0, 1, 2, 3, 4],
        [0, 1, 5, 6, 7],
    ]


def test_accepted_slots_are_copied_in_every_buffer_before_any_is_overwritten(kernels):
    buffers = [torch.randn(8, 2, 3), torch.randn(8, 5)]
    before = [b.clone() for b in buffers]
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([b[0].nbytes for b in buffers])
    kernels.copy_all_layer_kv_cache_cpu(pointers, strides, torch.tensor([3, 4]), torch.tensor([4, 6]))
    for now, old in zip(buffers, before, strict=True):
        assert torch.equal(now, old[[0, 1, 2, 4, 6, 5, 6, 7]])


def _built(kernels, selected, parents, topk, length=10):
    nodes = len(selected) + 1
    mask, positions = torch.ones(nodes * nodes, dtype=torch.bool), torch.zeros(nodes, dtype=torch.int64)
    links = [torch.full((1, nodes), -1) for _ in range(3)]
    kernels.build_tree_kernel_efficient_cpu(
        torch.tensor([parents]), torch.tensor([selected]), torch.tensor([length]), mask, positions, *links, topk, 3,
        nodes, 1,
    )  # fmt: skip
    return mask.view(nodes, nodes).int().tolist(), positions.tolist(), *links


# Two candidates a group: 0 and 1 below the root, 2 and 3 below 0, 4 and 5 below 1, 6 and 7 below 3, 8 and 9 below 5.
PARENTS = [-1, 0, 1, 3, 5]


def test_a_tree_gets_its_mask_positions_and_links(kernels):
    """Selected: 0 1 | 2 3 (children of 0), 5 (of 1) | 6 (of 3); nodes 1 .. 6 in that order."""
    mask, positions, index, child, sibling = _built(kernels, [0, 1, 2, 3, 5, 6], PARENTS, 2)
    assert mask == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 0, 1],
    ]
    assert positions == [10, 11, 11, 12, 12, 12, 13]
    assert index.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert child.tolist() == [[1, 3, 5, -1, 6, -1, -1]]
    assert sibling.tolist() == [[-1, 2, -1, 4, -1, -1, -1]]


def test_a_node_without_its_parent_hangs_on_nothing(kernels):
    mask, positions, _, child, sibling = _built(kernels, [0, 5, 9], PARENTS, 2)
    assert mask == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert positions == [10, 11, 11, 12]
    assert (child.tolist(), sibling.tolist()) == ([[1, -1, 3, -1]], [[-1, -1, -1, -1]])


@pytest.mark.parametrize(
    ("truth", "path"),
    [
        ([20, 0, 0, 0, 0, 0, 0], [0]),  # no child has this token
        ([12, 0, 40, 0, 0, 0, 0], [0, 2]),
        ([12, 0, 15, 0, 0, 41, 0], [0, 2, 5]),
        ([11, 14, 0, 0, 16, 0, 42], [0, 1, 4, 6]),  # past siblings, to the leaf
    ],
)
def test_verification_follows_the_targets_argmax(kernels, truth, path, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_TRACE", str(tmp_path / "trace"))
    _, _, index, child, sibling = _built(kernels, [0, 1, 2, 3, 5, 6], PARENTS, 2)
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15, 16]])
    predicts = torch.zeros(14, dtype=torch.int32)
    accepted, count = torch.full((2, 4), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    both = [x.repeat(2, 1) for x in (tokens, index, child, sibling)]
    both[1][1] += 7
    kernels.verify_tree_greedy_cpu(predicts, accepted, count, *both, torch.tensor([[99] * 7, truth]))
    assert count.tolist() == [0, len(path) - 1]
    assert accepted[1].tolist() == [7 + i for i in path] + [-1] * (4 - len(path))
    assert [predicts[7 + i].item() for i in path] == [truth[i] for i in path]
    line = json.loads((tmp_path / "trace").read_text().splitlines()[1])
    assert (line["tokens"], line["accepted"]) == (tokens[0].tolist(), len(path) - 1)
    assert line["bonus"] == truth[path[-1]]


def test_the_bonus_and_the_slots_of_what_was_accepted(kernels):
    bonus = torch.zeros(2, dtype=torch.int64)
    kernels.fill_bonus_tokens_cpu(torch.arange(10, 18), torch.tensor([1, 3]), bonus, 4)
    assert bonus.tolist() == [10, 16]
    out = torch.zeros(8, dtype=torch.int64)
    accepted = torch.tensor([[0, 2, -1, -1], [4, 5, 7, -1]], dtype=torch.int32)
    kernels.fill_accept_out_cache_loc_cpu(accepted, torch.arange(100, 108), out)
    assert out.tolist() == [100, 102, 104, 105, 107, 0, 0, 0]
