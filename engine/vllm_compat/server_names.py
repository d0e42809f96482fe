"""The names of vLLM's HTTP server. Importing this module takes seconds more than that of `names`."""

from weft.engine.vllm_compat.logs import leave_the_root_logger
from weft.engine.vllm_compat.versions.version import require_vllm

require_vllm()
leave_the_root_logger()

from vllm import envs  # noqa: E402  the version is checked first
from vllm.engine.protocol import EngineClient  # noqa: E402
from vllm.entrypoints.launchers.api_server.app_state import init_app_state  # noqa: E402
from vllm.entrypoints.launchers.app import build_app  # noqa: E402
from vllm.entrypoints.launchers.launcher import setup_server  # noqa: E402
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config  # noqa: E402
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler  # noqa: E402
from vllm.exceptions import GracefulHTTPError  # noqa: E402
from vllm.tracing.otel import get_span_exporter  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm.v1.metrics.prometheus import get_prometheus_registry  # noqa: E402

try:  # since vLLM 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
