"""Axis letters, the mesh, and the one table from letter to mesh axis.

    B batch           T position         S key position     K unroll depth (training-time test)
    D model width     M fused input: all aux states side by side   C = 2D, embedding beside hidden
    N query heads     G key/value heads  H head width       F feed-forward width
    V vocabulary      U draft vocabulary L layers

Arrays of rank >= 2 carry their letters as a suffix (`logits_BTU`); layouts and einsums use the same letters
in lower case.
"""

import contextlib
from collections.abc import Callable

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eagle3_jax.errors import ConfigError

MESH_AXES = ("data", "model")

# Letters that are absent are replicated.
RULES = {"b": "data", "n": "model", "g": "model", "f": "model", "u": "model", "v": "model"}


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """A `data x model` mesh over the first data*model devices; on a CPU as many virtual ones, if it is asked first."""
    wanted = data * model
    if wanted > 1:
        virtual_cpus(wanted)
    there = jax.device_count()
    if wanted > there:
        raise ConfigError(f"mesh.data={data} x mesh.model={model} wants {wanted} devices, {there} found")
    return jax.make_mesh(
        (data, model), MESH_AXES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:wanted]
    )


def virtual_cpus(count: int) -> None:
    """Have a CPU pass for `count` devices; without effect once the devices are in use."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def data_mesh(wanted: int) -> Mesh:
    """A mesh that only spreads rows, over `wanted` devices or as many as there are."""
    return make_mesh(min(wanted, jax.device_count()))


def spec(mesh: Mesh, axes: str, shape: tuple[int, ...] | None = None) -> PartitionSpec:
    """Partition of an array whose axes are `axes`, e.g. "c n h".

    With `shape`, an axis that its mesh axis does not divide is replicated. Where one mesh axis is wanted
    twice, the first axis that it divides gets it.
    """
    parts, used = [], set()
    for i, letter in enumerate(axes.split()):
        name = RULES.get(letter)
        if name in used or (name and shape is not None and shape[i] % mesh.shape[name]):
            name = None
        parts.append(name)
        used |= {name} - {None}
    return PartitionSpec(*parts)


def named(mesh: Mesh, axes: str, shape: tuple[int, ...] | None = None) -> NamedSharding:
    """NamedSharding for an array whose axes are `axes`, e.g. named(mesh, "b t d")."""
    return NamedSharding(mesh, spec(mesh, axes, shape))


def shardings(mesh: Mesh, axes: dict, shapes: dict) -> dict:
    """NamedShardings for a tree of arrays (or ShapeDtypeStructs), given the tree of their axes."""
    return jax.tree.map(lambda a, x: named(mesh, a, x.shape), axes, shapes)


def replicated_by_need(mesh: Mesh, axes: str, shape: tuple[int, ...]) -> list[str]:
    """Letters of `axes` that RULES would shard but whose size the mesh axis does not divide."""
    wanted = [(a, RULES.get(a), n) for a, n in zip(axes.split(), shape, strict=True)]
    return [a for a, name, n in wanted if name and n % mesh.shape[name]]


def rows(mesh: Mesh) -> NamedSharding:
    """Rows over the data axis, whatever else an array has."""
    return NamedSharding(mesh, PartitionSpec("data"))


def round_up(n: int, step: int) -> int:
    """The least multiple of `step` that is not below `n`."""
    return -(-n // step) * step


def over_rows(
    function: Callable, mesh: Mesh, arguments: int, whole: int, donate: tuple[int, ...] = ()
) -> Callable:
    """Jit `function` of `arguments` arguments so that every data shard runs it on its own rows.

    The first `whole` arguments are the same everywhere; all others, and the results, have rows as first axis.
    """
    specs = tuple(PartitionSpec() if i < whole else PartitionSpec("data") for i in range(arguments))
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("data"), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=donate)


def check_batch(mesh: Mesh, rows: int, key: str = "train.batch") -> None:
    """A batch that the data axis does not divide is an error: padding it would change the loss."""
    if rows % mesh.shape["data"]:
        raise ConfigError(
            f"{key}={rows} rows do not divide over mesh.data={mesh.shape['data']}; "
            f"nearest: {max(1, round(rows / mesh.shape['data'])) * mesh.shape['data']}"
        )
