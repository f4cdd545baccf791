"""Pages and notebooks run the same few programs, which are compiled once for all of them."""

import functools
import os

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import dgemma_jax as dg
from dgemma_jax.compilation import keep_on_disk
from dgemma_jax.program_cache import VARIABLE, own_directory

load = dg.load
load_once = functools.cache(load)


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """This process keeps programs where commands keep theirs, and a model that was loaded is not loaded again.

    Per module: a package's fixture lasts until the end of the session where the package has no __init__.py.
    """
    directory, before = os.environ.get(VARIABLE) or own_directory(), jax.config.jax_compilation_cache_dir
    dg.load = load_once
    if directory is not None:
        keep_on_disk(directory)
    yield
    dg.load = load
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", before)
