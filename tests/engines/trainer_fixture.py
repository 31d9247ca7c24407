"""Drafts that SpecForge's and speculators' classes are given, and what they should make of them.

Row t of unroll step k reads token ids[t + k]. At the last row of a prompt of ROWS these are the steps of a draft that
is being served, so that the same cached draft answers for all of them.
"""

import bridge_fixture as fixture
import numpy as np
import transformers

from bridge import convert, parity

ROWS, STEPS = 125, 3  # together 128: a whole block of flex attention, which speculators computes in
TOLERANCE = 1e-5
SHAPES = ("plain", "square", "fc_norm", "llama3", "norm_output")


def drafts(target) -> dict:
    """Of three aux states: SpecForge knows no other number."""
    found = {name: fixture.draft(name, "float32", str(target), num_aux_hidden_states=3) for name in SHAPES}
    for draft in found.values():
        draft.meta["aux_layers"] = [1, 2, 3]
    return found


def save_target(path) -> None:
    p = fixture.PLAIN
    same = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = transformers.LlamaConfig(
        **{k: p[k] for k in same}, intermediate_size=32, num_hidden_layers=7, bos_token_id=0, eos_token_id=1
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)


def run(scripts, script: str, root) -> dict[str, tuple]:
    """Per shape (draft, ids, aux, the class's answers)."""
    save_target(root / "target")
    rng, cases = np.random.default_rng(2), {}
    for name, draft in drafts(root / "target").items():
        convert.write(draft, "run", root / name)
        ids = rng.integers(0, draft.shape.vocab_size, ROWS + STEPS)
        aux = rng.standard_normal((len(ids), draft.shape.sizes["m"]), np.float32)
        cases[name] = (draft, root / name, ids, aux)
    given = [case[1:] for case in cases.values()]
    answers = scripts.drafts(script, given, STEPS, target=str(root / "target"))
    return {
        name: (draft, ids, aux, found)
        for (name, (draft, _, ids, aux)), found in zip(cases.items(), answers, strict=True)
    }


def differences(draft, ids, aux, answers) -> list[float]:
    """Max |difference| of the logits: of all rows at step 0, of the last row of the prompt at each later step."""
    ours, found = parity.Cached(draft, convert.DTYPES["float32"]), []
    for k in range(STEPS + 1):
        stages = ours.draft(int(ids[ROWS - 1 + k])) if k else ours.prefill(ids[:ROWS], aux[:ROWS])
        theirs = answers[f"logits/{k}"][ROWS - 1 : ROWS] if k else answers["logits/0"][:ROWS]
        assert theirs.shape == stages["logits"].shape
        found.append(float(np.abs(theirs - stages["logits"]).max()))
    return found
