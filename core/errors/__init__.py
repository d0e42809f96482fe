"""Every error that Weft raises, in one tree. Each message says what happened, then what to do.

::

    WeftError
    ├── ProgramError                    the @program side
    │   ├── ProgramParameterError       (TypeError) @program on a function without a Program parameter
    │   ├── ProgramEndedError           a call on a program that has ended
    │   └── ProgramEngineError          a call on another engine than the program's own
    ├── ArgumentTypeError               (TypeError) an argument of the wrong kind, e.g. a name instead of an engine
    ├── InvalidIdError                  (ValueError) an id that cannot travel with a request
    ├── TraceError                      (ValueError) a file or text that holds no graph or trace of a program
    ├── SimulationError                 (ValueError) invalid settings, or programs that do not fit the engines
    ├── BenchError                      (ValueError) `weft bench` cannot be set up as asked
    ├── StateError                      (ValueError) a text that holds no state of an engine
    ├── NotReachableError               (ConnectionError) no Weft server answers at an address
    ├── UnknownOptionError              (ValueError) a command has no option of this name
    ├── HistoryError                    (ValueError) a file or text that holds no history of programs
    ├── PolicyError                     (ValueError) unknown policy, bounds that do not increase, beta <= 0, ...
    ├── KvPolicyError                   (ValueError) unknown KV policy or parameter, a weight out of range, ...
    ├── BalancerError                   (ValueError) unknown balancer or parameter, a negative threshold, ...
    ├── CallError                       one LLM call was refused or failed
    │   ├── InvalidRequestError         (ValueError) the request itself is wrong
    │   │   ├── ContextLengthError      the prompt does not fit the model's context
    │   │   └── UnknownModelError       the engine serves no model of this name
    │   ├── OutputParsingError          the model's output does not have the requested structure
    │   ├── CallFailedError             the engine failed on this call; other calls are not affected
    │   │   └── RetryableCallError      it failed for a reason that passes, such as a pause of the engine
    │   ├── OverloadedError             too many calls are in flight; the error says when to retry
    │   │   ├── KeyLimitError           an API key has reached a limit of its own
    │   │   └── ArrivingError           too much of other requests is still arriving at the server
    │   ├── DeadlineError               (TimeoutError) the call, or its program, exceeded its time limit
    │   ├── ReplicaLostError            the replica that ran the call died; the error says how much was delivered
    │   └── ScriptError                 (AssertionError) a `weft.testing.ScriptedEngine` has no reply for the call
    ├── ScriptFileError                 (ValueError) a file of scripted answers cannot be read, or makes no sense
    ├── MissingPackageError             (ImportError) an integration's framework is not installed
    └── EngineError                     the engine side
        ├── VllmUnavailableError        (ImportError) vLLM cannot be imported
        ├── UnsupportedVllmError        a vLLM that is too old, or newer and changed
        ├── KeyFileError                (ValueError) a file of API keys cannot be read, or makes no sense
        ├── ModelNotFoundError          (ValueError) the model is neither a folder nor known to the hub
        ├── ModelPrepareError           the embedded model could not be fetched or converted
        ├── EngineStartError            the engine did not start
        ├── ListenError                 (ValueError) an engine cannot listen at this address
        ├── EngineClosedError           a call on an engine that was shut down
        ├── EngineForkedError           a use of an engine in a fork of the process that started it
        ├── EngineDiedError             an engine process ended by itself
        ├── ReplicaError                (ValueError) zero replicas, an unknown replica, ...
        ├── ClusterError                Ray is not installed, or its cluster does not answer
        ├── NoReplicaError              no replica of the model is ready
        ├── ServerError                 the server of `weft.connect` is not there, refuses the client, or did not answer
        └── SwapError                   KV cannot be swapped between the engine's cache and the host pool
            ├── SwapArgumentError       (ValueError) blocks, slots or caches that cannot be swapped as given
            ├── SwapDeviceError         CUDA is missing, or reported an error
            └── PoolClosedError         the host pool was closed

The errors that are also built-in exceptions (in brackets) are caught by code that expects the built-in exception.
"""

from __future__ import annotations

from weft.core.errors.base import WeftError, restored
from weft.core.errors.calls import (
    ArrivingError,
    CallError,
    CallFailedError,
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    KeyLimitError,
    OutputParsingError,
    OverloadedError,
    ReplicaLostError,
    RetryableCallError,
    ScriptError,
    UnknownModelError,
)
from weft.core.errors.engines import (
    ClusterError,
    EngineClosedError,
    EngineDiedError,
    EngineError,
    EngineForkedError,
    EngineStartError,
    KeyFileError,
    ListenError,
    ModelNotFoundError,
    ModelPrepareError,
    NoReplicaError,
    ReplicaError,
    ServerError,
    UnsupportedVllmError,
    VllmUnavailableError,
)
from weft.core.errors.inputs import (
    BalancerError,
    BenchError,
    HistoryError,
    KvPolicyError,
    MissingPackageError,
    NotReachableError,
    PolicyError,
    ScriptFileError,
    SimulationError,
    StateError,
    TraceError,
    UnknownOptionError,
)
from weft.core.errors.programs import (
    ArgumentTypeError,
    InvalidIdError,
    ProgramEndedError,
    ProgramEngineError,
    ProgramError,
    ProgramParameterError,
)
from weft.core.errors.swaps import PoolClosedError, SwapArgumentError, SwapDeviceError, SwapError

__all__ = [
    "ArgumentTypeError",
    "ArrivingError",
    "BalancerError",
    "BenchError",
    "CallError",
    "CallFailedError",
    "ClusterError",
    "ContextLengthError",
    "DeadlineError",
    "EngineClosedError",
    "EngineDiedError",
    "EngineError",
    "EngineForkedError",
    "EngineStartError",
    "HistoryError",
    "InvalidIdError",
    "InvalidRequestError",
    "KeyFileError",
    "KeyLimitError",
    "KvPolicyError",
    "ListenError",
    "MissingPackageError",
    "ModelNotFoundError",
    "ModelPrepareError",
    "NoReplicaError",
    "NotReachableError",
    "OutputParsingError",
    "OverloadedError",
    "PolicyError",
    "PoolClosedError",
    "ProgramEndedError",
    "ProgramEngineError",
    "ProgramError",
    "ProgramParameterError",
    "ReplicaError",
    "ReplicaLostError",
    "RetryableCallError",
    "ScriptError",
    "ScriptFileError",
    "ServerError",
    "SimulationError",
    "StateError",
    "SwapArgumentError",
    "SwapDeviceError",
    "SwapError",
    "TraceError",
    "UnknownModelError",
    "UnknownOptionError",
    "UnsupportedVllmError",
    "VllmUnavailableError",
    "WeftError",
    "restored",
]

for _name in __all__:
    globals()[_name].__module__ = __name__  # a traceback and a pickle name the public place
del _name
