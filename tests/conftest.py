"""Eight virtual CPU devices for every test. Must run before anything touches a JAX device."""

import os

# Nearly all of the time goes into compiling tiny programs once.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
    ]
)

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A tiny project with data prepared and features captured."""
    import tiny

    return tiny.prepared(tmp_path_factory.mktemp("project"))
