"""Counting what XLA compiles."""

import logging
from contextlib import ExitStack

import jax


class Compilations(ExitStack):
    """names: the programs compiled inside the block."""

    def __enter__(self):
        self.names: list[str] = []
        handler, logger = logging.Handler(), logging.getLogger("jax._src.dispatch")
        handler.emit = self._seen
        logger.addHandler(handler)
        self.callback(logger.removeHandler, handler)
        # Not jax.log_compiles(), which would see this thread alone and not an engine's worker.
        before = jax.config.jax_log_compiles
        jax.config.update("jax_log_compiles", True)
        self.callback(jax.config.update, "jax_log_compiles", before)
        return self

    def _seen(self, record: logging.LogRecord) -> None:
        if "XLA compilation" in record.getMessage():
            self.names.append(record.getMessage())
