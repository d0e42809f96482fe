"""`weft profile`: measure an engine's steps for `weft advise`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from weft.commands.progress import Bars
from weft.core.files import writing

_BAD_FIT: Final = 0.2


def profile(
    model: Annotated[
        str, typer.Argument(help="embedded, tiny (random), or a folder or a name of the hub.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The file to write, for weft advise --engine.")] = Path("engine.json"),
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Calls that the engine runs at once, as vLLM's option.")
    ] = 64,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a step, as vLLM's option (default: vLLM's).")
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that its KV cache holds (default: as vLLM sizes it).")
    ] = None,
) -> None:
    """Measure how long the steps of stock vLLM take with a model on this machine, and write a profile of the engine.

    It takes about a minute after the start of the engine. No other process should use the device meanwhile.
    """
    from weft.bench.profile import profile as measure
    from weft.engine.vllm_compat.versions.version import check_vllm

    check_vllm()
    with Bars(stays=True) as progress:
        found = measure(
            model,
            batch_size=max_num_seqs,
            chunk_tokens=max_num_batched_tokens,
            kv_tokens=kv_tokens,
            begin=lambda total: progress.begin("measuring", total),
            advance=progress.advance,
        )
    with writing(out, "--out"):
        found.engine.write(out)
    times = found.engine.step_time
    typer.echo(
        f"{out}: a step takes {times.fixed_s * 1e3:.2f} ms, and {times.decode_token_s * 1e6:.1f} us for each call that "
        f"decodes, {times.prefill_token_s * 1e6:.1f} us for each prompt token and {times.context_token_s * 1e9:.1f} ns "
        "for each token of context"
    )
    typer.echo(f"The KV cache holds {found.engine.kv_tokens:,} tokens of {found.engine.kv_token_bytes:,} bytes.")
    typer.echo(f"{found.steps} steps were measured; their fitted time is off by {found.error:.1%} in the median.")
    if found.error > _BAD_FIT:
        typer.echo("That is much: another process may have used the device. Run it again when the machine is quiet.")
