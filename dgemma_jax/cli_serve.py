"""`dgemma serve`: the OpenAI-compatible server as a process, from its flags to its exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from argparse import Namespace
from typing import TYPE_CHECKING

from dgemma_jax.cli import EXIT_ERROR, EXIT_INTERRUPTED, leave
from dgemma_jax.parallel import check_parallel, mesh_of

if TYPE_CHECKING:
    from types import FrameType

    from fastapi import FastAPI
    from jax.sharding import Mesh

    from dgemma_jax.engine.engine import Engine

logger = logging.getLogger(__name__)
KEY_VARIABLE = "DGEMMA_API_KEY"
GRACE_SECONDS = 5  # at the very end, for what clients are still being sent, and for the engine to stop
FIRST_WORDS_SECONDS = 1.0  # for a connection that has not sent a request yet
POLL_SECONDS = 0.02
POSITIVE = ("max_num_seqs", "max_model_len", "max_body_bytes", "request_timeout", "log_interval")


def run(args: Namespace) -> int:
    """Serves until a signal ends it. 0 after SIGTERM, 130 after SIGINT, 2 if the engine failed.

    ValueError for flags that cannot be honoured, before weights are read.
    """
    api_key = _checked(args)
    # Names in a client's tool schemas are for the client: not for this process' log, nor for Python's list of warnings.
    warnings.filterwarnings("ignore", message="tool schema, ")
    try:
        import uvicorn  # noqa: F401

        from dgemma_jax.serve.app import create_app
        from dgemma_jax.serve.images import ImageRules
    except ImportError as error:
        raise ValueError(f"serving needs more packages ({error}); pip install 'dgemma-jax[serve]'") from None
    with _bound(args.host, args.port) as listener:
        import dgemma_jax as dg
        from dgemma_jax.engine.capacity import MEMORY_FRACTION

        logging.getLogger("dgemma_jax").setLevel(logging.INFO)
        mesh = mesh_of(args)
        fraction = MEMORY_FRACTION if args.memory_fraction is None else args.memory_fraction
        _check_fits(args, mesh, fraction)
        how = {"attention_implementation": args.attention_implementation, "mesh": mesh}
        model = dg.load(args.model, args.dtype, args.max_model_len, **how)
        if model.tokenizer is None:
            raise ValueError(f"{args.model} has no tokenizer.json; a server needs one, for text and for chats")
        engine = dg.Engine(model, args.max_num_seqs, max_model_len=args.max_model_len, memory_fraction=fraction)
        app = create_app(
            engine,
            args.served_model_name or args.model,
            api_key=api_key,
            max_queue=args.max_queue,
            request_timeout=args.request_timeout,
            max_body_bytes=args.max_body_bytes,
            vllm_metric_names=args.vllm_metric_names,
            log_interval=args.log_interval,
            images=ImageRules(args.max_images, args.allow_remote_images),
        )
        return serve(app, listener, args.shutdown_timeout)


def serve(app: FastAPI, listener: socket.socket, shutdown_timeout: float) -> int:
    """Serves until a signal or the end of the engine, then lets requests finish for so many seconds.

    A second signal ends the process at once.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    lifecycle = app.state.lifecycle

    def silent(connection: object) -> bool:
        return isinstance(connection, H11Protocol) and connection.cycle is None

    class Server(uvicorn.Server):
        """Goes on listening while it drains, so that new requests are told to go elsewhere."""

        code, signalled = 0, False

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.signalled:
                leave(EXIT_INTERRUPTED)
            self.signalled = True
            self.code = EXIT_INTERRUPTED if sig == signal.SIGINT else 0
            self.should_exit = True

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            host, port = listener.getsockname()[:2]
            where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            logger.info("listening on %s, documented at %s/docs", where, where)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await lifecycle.drain(shutdown_timeout)
            for one in self.servers:
                one.close()
            await self._first_requests()
            await super().shutdown(sockets)

        async def _first_requests(self) -> None:
            """Waits a little for connections whose request is on its way: closed now, they would be reset."""
            end = time.monotonic() + FIRST_WORDS_SECONDS
            while time.monotonic() < end and any(map(silent, self.server_state.connections)):
                await asyncio.sleep(POLL_SECONDS)

    for name, level in (("uvicorn.error", logging.WARNING), ("uvicorn.access", logging.INFO)):
        logging.getLogger(name).setLevel(level)
    # h11 bounds the length of headers, which httptools does not.
    config = uvicorn.Config(app, http="h11", log_config=None, ws="none", timeout_graceful_shutdown=GRACE_SECONDS)
    server = Server(config)
    lifecycle.dead = lambda: setattr(server, "should_exit", True)
    server.run([listener])
    return _stopped(lifecycle.engine, server.code)


def _stopped(engine: Engine, code: int) -> int:
    """The exit code, once the engine has ended; one that is amid a compilation is not waited for."""
    if engine.error is not None:
        print(f"dgemma: error: the engine has failed: {engine.error!r}", file=sys.stderr)
        return EXIT_ERROR
    closing = threading.Thread(target=engine.close, kwargs={"cancel": True}, daemon=True)
    closing.start()
    closing.join(GRACE_SECONDS)
    if closing.is_alive():
        leave(code)
    return code


def _checked(args: Namespace) -> str | None:
    """The API key, if there is one, after a look at what needs no model."""
    check_parallel(pipeline_parallel_size=args.pipeline_parallel_size)
    for name in POSITIVE:
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"{_flag(name)} is {value}; expected more than 0")
    for name in ("max_queue", "max_images", "shutdown_timeout"):
        if not getattr(args, name) >= 0:
            raise ValueError(f"{_flag(name)} is {getattr(args, name)}; expected 0 or more")
    if args.memory_fraction is not None and not 0 < args.memory_fraction <= 1:
        raise ValueError(f"--memory-fraction is {args.memory_fraction}; expected above 0 and at most 1")
    if not 0 <= args.port < 1 << 16:
        raise ValueError(f"--port is {args.port}; expected 0 .. 65535, 0 for any that is free")
    source, key = (
        ("--api-key", args.api_key) if args.api_key is not None else (KEY_VARIABLE, os.environ.get(KEY_VARIABLE))
    )
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise ValueError(f"{source} is empty or holds characters that no header carries; expected printable ASCII")
    return key


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_fits(args: Namespace, mesh: Mesh | None, fraction: float) -> None:
    """ValueError, with the bytes, if what is asked for will not fit beside the weights: the engine's own plan."""
    import jax

    from dgemma_jax.checkpoint import dtype_name, open_directory
    from dgemma_jax.engine.capacity import context, plan
    from dgemma_jax.model.transformer import build
    from dgemma_jax.sharding import share

    opened = open_directory(args.model)
    config, dtype = opened.config, dtype_name(args.dtype) or opened.weights.dtype or opened.config.dtype
    length = None if args.max_model_len is None else context(config, dtype, args.max_model_len, mesh)
    params = jax.tree.leaves(build(config, dtype, mesh=mesh)[1])
    weights = sum(share(leaf) * leaf.dtype.itemsize for leaf in params)
    longest = config.max_position_embeddings
    plan(config, dtype, args.max_num_seqs, length, longest, None, fraction, weights, mesh)


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has the address and does not listen yet."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(f"--host {host} --port {port} cannot be used ({error.strerror}); choose others") from None
    return listener
