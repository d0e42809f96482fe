"""The simulation of program-aware serving, with the policies and balancers of the engines (docs/how-to/simulate.md).

`weft sim`, benchmarks and tests use `simulate`. It repeats to the digit.
"""

from weft.core.errors import SimulationError as SimulationError
from weft.core.sim.result import Batch as Batch
from weft.core.sim.result import ProgramResult as ProgramResult
from weft.core.sim.result import SimResult as SimResult
from weft.core.sim.settings import SimSettings as SimSettings
from weft.core.sim.settings import StepSample as StepSample
from weft.core.sim.settings import StepTime as StepTime
from weft.core.sim.simulator import simulate as simulate
from weft.core.sim.study.load import capacity as capacity
from weft.core.trace.format import TraceCall as TraceCall
from weft.core.trace.format import TraceProgram as TraceProgram
