"""Tests of training share the programs that they compile, with the processes they start too."""

import os
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="package", autouse=True)
def shared_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use JAX's persistent cache in a folder of this test run.

    Most tests here take the same few training steps, each of which compiles for seconds.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    settings = {
        "jax_compilation_cache_dir": str(folder / "programs"),
        # Looking up a small program costs as much as compiling it.
        "jax_persistent_cache_min_compile_time_secs": 0.3,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        compilation_cache.reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
