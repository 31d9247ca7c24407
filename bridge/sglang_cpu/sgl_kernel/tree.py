"""The draft tree: its shape for the verify forward, greedy verification, and what is accepted.

With EAGLE3_TRACE set to a path, every verification of a request appends one JSON line to that file: the
tokens to verify (the bonus first), the tree, how many drafts were accepted and the next bonus.
"""

import json
import os

import torch

ONLY_NEW_TOKENS = 1  # TreeMaskMode.QLEN_ONLY


def build_tree_kernel_efficient_cpu(
    parent_list, selected_index, verified_seq_len, tree_mask, positions, retrieve_index, retrieve_next_token,
    retrieve_next_sibling, topk, depth, draft_token_num, tree_mask_mode,
):  # fmt: skip
    """Mask, positions and links of the tree that is to be verified; node 0 is the bonus, the root.

    parent_list              R ?     candidate that each group of K candidates descends from, the first being the root
    selected_index           R Q-1   candidates that became nodes 1 .., ascending: a parent precedes its children
    verified_seq_len         R       position of the root
    tree_mask                R*Q*Q   out: row i is True at node i, its ancestors and the root
    positions                R*Q     out: position of the root plus the node's depth
    retrieve_index           R Q     out: row of each node among all requests' nodes
    retrieve_next_token      R Q     out: first child, or -1 (as it comes in)
    retrieve_next_sibling    R Q     out: next child of the same parent, or -1 (as it comes in)
    """
    if int(tree_mask_mode) != ONLY_NEW_TOKENS:
        raise NotImplementedError(
            f"tree_mask_mode={tree_mask_mode}: only masks over the new tokens are built"
        )
    requests, nodes = retrieve_index.shape
    retrieve_index.copy_(torch.arange(requests * nodes).view(requests, nodes))
    seen, depths = torch.zeros(requests, nodes, nodes, dtype=torch.bool), torch.zeros(requests, nodes).long()
    seen[:, :, 0] = True
    for r, (selected, ancestors) in enumerate(
        zip(selected_index.tolist(), parent_list.tolist(), strict=True)
    ):
        place = {candidate: i for i, candidate in enumerate(selected, 1)}
        last_child = {}
        for i, candidate in enumerate(selected, 1):
            group = candidate // topk
            # A candidate whose parent was not selected hangs on nothing: it is computed and never visited.
            parent = 0 if group == 0 else place.get(ancestors[group])
            seen[r, i, i], depths[r, i] = True, 1
            if parent is None:
                continue
            seen[r, i] |= seen[r, parent]
            depths[r, i] += depths[r, parent]
            if parent in last_child:
                retrieve_next_sibling[r, last_child[parent]] = i
            else:
                retrieve_next_token[r, parent] = i
            last_child[parent] = i
    # The buffers may be made for a larger batch.
    tree_mask.view(-1)[: seen.numel()] = seen.view(-1)
    positions.view(-1)[: depths.numel()] = (verified_seq_len[:, None] + depths).view(-1)


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    """From the root, go on to the child that is the target's argmax, as long as there is one.

    predicts                 R*Q     out: the target's argmax at every visited node
    accept_index             R J+1   out: row of each visited node, the root first; -1 (as it comes in) after the last
    accept_token_num         R       out: accepted drafts, the bonus not counted
    candidates               R Q     token of each node
    retrive_*                R Q     as `build_tree_kernel_efficient_cpu` leaves them
    target_predict           R Q     the target's argmax after each node
    """
    for r in range(len(candidates)):
        rows, children, siblings, tokens, truth = (
            x[r].tolist()
            for x in (retrive_index, retrive_next_token, retrive_next_sibling, candidates, target_predict)
        )
        visited, node = [0], children[0]
        while node != -1 and len(visited) < accept_index.shape[1]:
            if tokens[node] == truth[visited[-1]]:
                visited.append(node)
                node = children[node]
            else:
                node = siblings[node]
        accept_token_num[r] = len(visited) - 1
        for k, node in enumerate(visited):
            accept_index[r, k] = rows[node]
            predicts[rows[node]] = truth[node]
        _trace(
            tokens=tokens,
            child=children,
            sibling=siblings,
            accepted=len(visited) - 1,
            bonus=truth[visited[-1]],
        )


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """bonus_tokens [R] = the last accepted token: accept_tokens [R*(J+1)], of which accept_lens [R] count."""
    accepted = accept_tokens.view(-1, accept_stride)
    bonus_tokens.copy_(accepted.gather(1, accept_lens.long()[:, None] - 1)[:, 0])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """Slots of the accepted nodes: out_cache_loc [R*Q] at accept_index [R, J+1] where that is not -1, packed."""
    accepted = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def rotate_input_ids_cpu(*arguments, **options):
    raise NotImplementedError("drafts of several prediction heads (MTP) are not run by the stand-in")


def _trace(**fields) -> None:
    if path := os.environ.get("EAGLE3_TRACE"):
        with open(path, "a") as file:
            file.write(json.dumps(fields) + "\n")
