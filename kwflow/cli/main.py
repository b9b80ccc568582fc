"""The command line: ``kwflow worker | swarm | status | doctor | demo``. Puts the parts together; imports them late."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kwflow.errors import KwargError, KwflowError, SpanError

app = typer.Typer(
    help="A transformer's blocks as pure functions on workers, with any keyword argument.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Argument(help="a folder, a .gguf file, a hub id (user/name@revision), or smollm2-135m")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16; auto is the checkpoint's")]
Quantize = Annotated[str, typer.Option(help="int8 or nf4, by bitsandbytes")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps")]
Join = Annotated[list[str] | None, typer.Option(help="address of a member of the swarm, /ip4/…/p2p/…; may be repeated")]


def main() -> None:
    """Run the command line; an error of kwflow's is one line and exit status 2."""
    try:
        app()
    except KwflowError as error:
        print(f"kwflow: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


@app.command()
def worker(
    model: Model,
    blocks: Annotated[str, typer.Option(help="layers start:stop, such as 0:15")],
    join: Join = None,
    threads: Annotated[int, typer.Option(min=1, help="torch threads")] = 1,
    dtype: Dtype = "auto",
    quantize: Quantize = "",
    device: Device = "auto",
    block_fn: Annotated[str, typer.Option(help="the worker's own block function, pkg.mod:fn")] = "",
    name: Annotated[str | None, typer.Option(help="what the swarm calls the model, if not as its folder or id")] = None,
    listen: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port to listen on; 0: any free one")] = 0,
    public: Annotated[bool, typer.Option(help="ask for UPnP, relays and auto-NAT")] = False,
    kv_mb: Annotated[int, typer.Option(min=1, help="megabytes of keys and values for sessions")] = 2048,
    keep_mb: Annotated[int, typer.Option(min=0, help="megabytes of tensors that clients upload, of all")] = 1024,
    keep_client_mb: Annotated[int, typer.Option(min=0, help="the same of one client")] = 512,
    supervised: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve layers of a model until interrupted."""
    from kwflow.swarm.lifetime import Parent

    parent = Parent() if supervised else None  # first: from here on this process ends with the one that started it
    try:
        start, stop = parse_span(blocks)
        function = import_function(block_fn) if block_fn else None
        if parent is not None:
            function = parent.receive_function() or function
        import torch

        from kwflow.models.files.checkpoint import swarm_name
        from kwflow.swarm.serve import load, serve

        swarm_model = swarm_name(model, name)
        torch.set_num_threads(threads)
        spec = load(model, start, stop, dtype, function, quantize=quantize, device=device)
        peers = parent.receive_peers() if parent is not None else join or []
        work = serve(
            spec,
            swarm_model,
            join=peers,
            listen=listen,
            port=port,
            public=public,
            kv_bytes=kv_mb << 20,
            keep_bytes=keep_mb << 20,
            keep_client_bytes=keep_client_mb << 20,
            parent=parent,
        )
        asyncio.run(work)
    except Exception as error:
        if parent is not None:
            parent.failed(error)
        raise


@app.command()
def swarm(
    model: Model,
    workers: Annotated[int, typer.Option(help="how many; they split the layers evenly")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="torch threads of each")] = 1,
    dtype: Dtype = "auto",
    quantize: Quantize = "",
    device: Device = "auto",
) -> None:
    """Start workers on this machine and print their addresses; they end with this command."""
    from kwflow.swarm.local import local_swarm

    with local_swarm(model, workers, dtype=dtype, quantize=quantize, device=device, threads=threads) as local:
        for process in local.workers:
            print(f"layers {process.span[0]}:{process.span[1]}  pid {process.pid}  {process.addrs[0]}", flush=True)
        print(f"\nkf.connect({model!r}, peers=[{local.peers[0]!r}])\nInterrupt to end.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


@app.command()
def status(join: Join = None, timeout: Annotated[float, typer.Option(help="seconds")] = 15.0) -> None:
    """Show who serves which layers."""
    from kwflow.cli.status import print_status

    if not join:
        raise KwargError("kwflow status needs --join ADDRESS: a worker prints its own when it starts")
    print_status(join, timeout)


@app.command()
def doctor() -> None:
    """Check this machine: what is wrong and how to mend it."""
    from kwflow.cli.doctor import doctor as examine
    from kwflow.cli.doctor import show

    findings = examine()
    show(findings)
    sys.exit(0 if all(finding.ok for finding in findings) else 1)


@app.command()
def demo(
    model: Annotated[str, typer.Argument()] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(help="tokens to generate")] = 40,
) -> None:
    """Run two workers of the embedded model and prove that they give the local model's values and gradients."""
    from kwflow.cli.demo import run_demo

    sys.exit(run_demo(model, tokens))


def parse_span(text: str) -> tuple[int, int]:
    """``"0:15"`` to (0, 15)."""
    start, colon, stop = text.partition(":")
    if not colon or not start.strip().isdigit() or not stop.strip().isdigit() or int(start) >= int(stop):
        raise SpanError(f"--blocks takes start:stop, such as 0:15, got {text!r}")
    return int(start), int(stop)


def import_function(where: str) -> Callable[..., Any]:
    """Import ``pkg.mod:fn``."""
    module, colon, name = where.partition(":")
    if not colon or not module or not name:
        raise KwargError(f"--block-fn takes pkg.mod:fn, got {where!r}")
    sys.path.insert(0, os.getcwd())  # as `python -m` does: a module of the folder one stands in
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise KwargError(f"--block-fn {where!r} cannot be imported: {error}") from error


if __name__ == "__main__":  # as `python -m kwflow`; else it would do nothing, and say so by nothing
    main()
