"""What may be wrong with a draft, each as a change that would undo it.

A hypothesis changes a reading; the doctor measures what the draft would accept then. The certain ones follow from the
files alone, and are what `bridge repair` does.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from bridge import check_tensors, engines, fields, weight_map
from bridge.doctor import reading as readings
from bridge.doctor.reading import Reading
from bridge.fields import AUX
from bridge.weight_map import D2T, T2D
from eagle3_jax.errors import UserError

HEAD, FC = "lm_head.weight", "fc.weight"
# option -> a tensor that it has
NORMS = {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}


@dataclasses.dataclass(frozen=True, eq=False)
class Hypothesis:
    """`name` says what is wrong, `fix` what to do. `apply` gives None where it does not arise."""

    name: str
    fix: str
    apply: Callable[[Reading], Reading | None]
    certain: bool = False


def certain(reading: Reading) -> Iterator[Hypothesis]:
    """What the files themselves say, whatever it costs."""
    yield Hypothesis("tensors under names that the engine drops", "rename them: bridge repair", names, True)
    yield Hypothesis("launched as EAGLE", f"--speculative-algorithm {engines.ALGORITHM}", _algorithm, True)
    fix = "eagle_config.use_aux_hidden_state: true: bridge repair"
    yield Hypothesis("aux states switched off", fix, aux_on, True)
    yield Hypothesis(
        "config.json's sizes are not the tensors'", "take the tensors': bridge repair", sizes, True
    )
    for name, tensor in NORMS.items():
        if name in reading.engine.options:
            yield Hypothesis(f"{name} is off, and its tensors are there", f"{name}: true: bridge repair",
                             lambda r, name=name, tensor=tensor: _switched_on(r, name, tensor), True)  # fmt: skip
    yield Hypothesis("kernels stored [in, out]", "transpose those: bridge repair", reshaped, True)
    yield from (h for h in maps(reading) if h.certain)


def names(reading: Reading) -> Reading | None:
    """Every tensor under our name, where the engine does not load it as it is."""
    renamed = {}
    for name, x in reading.tensors.items():
        ours = engines.spelled(name)
        lost = reading.engine.loads(name) != ours
        renamed[ours if lost and ours not in reading.tensors else name] = x
    if set(renamed) == set(reading.tensors):
        return None
    return reading.only(renamed)


def _algorithm(reading: Reading) -> Reading | None:
    return None if reading.eagle3 else reading.change(algorithm=engines.ALGORITHM)


def aux_on(reading: Reading) -> Reading | None:
    if reading.nested.get("use_aux_hidden_state") is not False:
        return None
    return reading.change({"eagle_config": reading.nested | {"use_aux_hidden_state": True}})


def sizes(reading: Reading) -> Reading | None:
    """The config's sizes that a tensor shows."""
    head, fc, gate = (reading.find(n) for n in (HEAD, FC, "midlayer.mlp.gate_proj.weight"))
    width, told = reading.config.get("hidden_size"), reading.config
    found = {}
    if head and reading.tensors[head].shape[1:] == (width,):
        found["draft_vocab_size"] = reading.tensors[head].shape[0]
    if gate and reading.tensors[gate].shape[1:] == (width,):
        found["intermediate_size"] = reading.tensors[gate].shape[0]
    columns = reading.tensors[fc].shape[1:] if fc else ()
    if columns and type(width) is int and width > 0 and told.get("num_aux_hidden_states"):
        count, rest = divmod(columns[0], width)
        found |= {"num_aux_hidden_states": count} if count and not rest else {}
    changed = {k: x for k, x in found.items() if told.get(k) != x}
    return reading.change(changed) if changed else None


def _switched_on(reading: Reading, name: str, tensor: str) -> Reading | None:
    if reading.find(tensor) is None or fields.option(reading.config, name):
        return None
    return reading.change({name: True})


def reshaped(reading: Reading) -> Reading | None:
    """Every kernel whose shape is the reverse of what is wanted, the right way round."""
    try:
        wanted = weight_map.their_shapes(reading.shape)
    except UserError:
        return None
    found = {name: (reading.find(name), shape) for name, shape in wanted.items()}
    turned = {
        there: np.ascontiguousarray(reading.tensors[there].T)
        for there, shape in found.values()
        if there and len(shape) == 2 and reading.tensors[there].shape == shape[::-1] != shape
    }
    return reading.change(tensors=turned) if turned else None


def maps(reading: Reading) -> Iterator[Hypothesis]:
    """Vocabulary maps that may have been meant; certain is the first that t2d confirms where d2t does not."""
    known = _listed(reading)
    now = d2t_of(reading)
    wrong = not _is(now, known) if known is not None else _absolute(reading)
    for name, fix, make in (
        ("d2t holds absolute target ids", "subtract arange: bridge repair", lambda d2t: d2t - np.arange(len(d2t))),
        ("arange was subtracted from d2t twice", "add it once: bridge repair", lambda d2t: d2t + np.arange(len(d2t))),
        ("d2t is not this draft's, t2d is", "derive it from t2d: bridge repair", lambda _: offsets_of(known)),
        ("the head's rows are the first target tokens", "d2t of zeros", np.zeros_like),
    ):  # fmt: skip
        d2t = make(now) if now is not None else offsets_of(known) if "t2d" in name else None
        if d2t is None or _mapped(reading, d2t) is None:
            continue
        sure = wrong and (_is(d2t, known) if known is not None else "absolute" in name)
        yield Hypothesis(name, fix, lambda r, d2t=d2t: _mapped(r, d2t), sure)
        wrong = wrong and not sure
    yield Hypothesis("d2t is another draft's", "export it again, with its own d2t: these files do not hold it",
                     lambda r: None if r.voted or not r.eagle3 else r.change(voted=True))  # fmt: skip


def d2t_of(reading: Reading) -> np.ndarray | None:
    """As the file has it, where its size is right."""
    name = reading.find(D2T)
    if name is None or reading.tensors[name].shape != (reading.config.get("draft_vocab_size"),):
        return None
    return reading.tensors[name].astype(np.int64)


def offsets_of(ids: np.ndarray | None) -> np.ndarray | None:
    return None if ids is None else ids - np.arange(len(ids))


def _listed(reading: Reading) -> np.ndarray | None:
    """The target ids that t2d lists, where it lists as many as the draft has."""
    name, count = reading.find(T2D), reading.config.get("draft_vocab_size")
    ids = np.flatnonzero(reading.tensors[name].astype(np.float32)) if name else ()
    return ids if name and len(ids) == count else None


def _is(d2t: np.ndarray | None, listed: np.ndarray) -> bool:
    return d2t is not None and np.array_equal(np.sort(d2t + np.arange(len(d2t))), listed)


def _absolute(reading: Reading) -> bool:
    d2t, full = d2t_of(reading), reading.config.get("vocab_size")
    return d2t is not None and type(full) is int and check_tensors.absolute(d2t, None, full)


def _mapped(reading: Reading, d2t: np.ndarray) -> Reading | None:
    """With this d2t, where it is another and a possible one."""
    old, full = reading.find(D2T), reading.config.get("vocab_size")
    ids = d2t + np.arange(len(d2t))
    if ids.min() < 0 or ids.max() >= full or len(np.unique(ids)) != len(ids):
        return None
    if old is not None and np.array_equal(reading.tensors[old], d2t):
        return None
    return reading.change(tensors={old or D2T: d2t})


def options() -> Iterator[Hypothesis]:
    """Each option of the draft the other way round, whatever the engine honours."""

    def flipped(reading: Reading, name: str) -> Reading | None:
        now = name in reading.engine.options and fields.option(reading.config, name)
        rules = reading.rules(options=tuple({*reading.engine.options, name}))
        nested = {k: v for k, v in reading.nested.items() if k != name}
        told = dict.fromkeys(engines.FIELDS.get(name, (name,)), not now)
        return reading.change({"eagle_config": nested} | told, engine=rules)

    for name, what in (
        ("norm_output", "the state that drafting goes on from, normed or not"),
        ("fc_norm", "norms of the aux states"),
        ("norm_before_fc", "a norm before fc"),
        ("norm_before_residual", "the residual of the normed state or not"),
    ):
        yield Hypothesis(f"{name} is the other way round", f"{what}: set {name}, or take an engine that honours it",
                         lambda r, name=name: flipped(r, name))  # fmt: skip


def aux_layers(reading: Reading) -> Iterator[Hypothesis]:
    """Other layers than those captured now."""
    try:
        now = readings.captured(reading)
    except UserError:
        now = ()
    shape, top = reading.served.shape, reading.config.get(AUX)
    default = list(shape.default_aux_layers) if shape.num_hidden_layers >= 7 else None

    def told(reading: Reading, layers: list[int]) -> Reading:
        lists = {"eagle_config": reading.nested | {AUX: layers}, AUX: [k + 1 for k in layers]}
        read = "nested" if reading.engine.aux == "fixed" else reading.engine.aux
        return reading.change(lists, engine=reading.rules(aux=read))

    count = reading.config.get("num_aux_hidden_states") or 3
    for name, layers in (
        ("the aux layers are one too low", [k + 1 for k in now]),
        ("the aux layers are one too high", [k - 1 for k in now]),
        ("the aux layers in eagle_config are not those captured", reading.nested.get(AUX)),
        ("the aux layers at the top are not those captured", [k - 1 for k in top] if _numbers(top) else None),
        ("the aux layers are not the engines' default ones", default),
    ):
        known = _numbers(layers) and len(layers) == count and tuple(layers) != now
        if known and all(0 <= k <= shape.num_hidden_layers - 2 for k in layers):
            yield Hypothesis(name, f"captured {list(now)}, wanted {list(layers)}: set them under both names",
                             lambda r, layers=layers: told(r, layers))  # fmt: skip


def _numbers(x: object) -> bool:
    return isinstance(x, list) and all(type(i) is int for i in x)
