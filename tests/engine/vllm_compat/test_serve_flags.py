"""The options that are read from vLLM's sources are those of its parser."""

from __future__ import annotations

import pytest

from weft.commands.shared import check_flags
from weft.engine.vllm_compat.known_names import serve_flags
from weft.engine.vllm_compat.server_names import FlexibleArgumentParser, make_arg_parser

pytestmark = pytest.mark.engine


def test_vllms_sources_name_the_options_of_its_parser() -> None:
    """All of them, or `weft serve` would refuse one that vLLM has; and few others, which it would let through."""
    parser = make_arg_parser(FlexibleArgumentParser())
    real = {name for action in parser._actions for name in action.option_strings}
    found = serve_flags()
    assert sorted(real - found) == []
    opposites = {each for each in found if each.startswith(("--no-", "--enable-", "--disable-"))}
    assert sorted(found - real - opposites) == ["--mamba-config", "--model-weights"]  # fields without an option


def test_what_vllms_parser_takes_passes() -> None:
    """Underscores, keys of a value in JSON, names that are cut short, short options, and values with a minus."""
    line = [
        *("--max_model_len=64", "--compilation_config.backend=eager", "--served", "m", "-tp", "2", "-O1"),
        *("-cc.mode", "0", "--seed", "-1"),
    ]
    check_flags([*line, "--chat-template", "-- a text"], serve_flags(), ())
    parser = make_arg_parser(FlexibleArgumentParser())
    options = parser.parse_args([*line, "--chat-template=-- a text"])
    assert (options.max_model_len, options.tensor_parallel_size, options.seed) == (64, 2, -1)
