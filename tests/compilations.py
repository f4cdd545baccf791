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
        self.enter_context(jax.log_compiles())
        return self

    def _seen(self, record: logging.LogRecord) -> None:
        if "XLA compilation" in record.getMessage():
            self.names.append(record.getMessage())
