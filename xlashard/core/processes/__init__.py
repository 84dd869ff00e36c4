"""Communication between the processes of one program: shared keys, barriers and liveness.

| modules | contents |
|---|---|
| `store` | key-value store shared by all processes, for values of any size |
| `rendezvous` | barriers that exchange one text per process |
| `wait_graph` | published status of waiting processes, and deadlock detection |
| `equality` | comparison of values between processes, by digests |
| `stack_dump` | Python stacks of every process, also of a hung one |
| `process_facts` | host, versions, digests of code and memory of a process |
| `awaited_calls` | calls that a frame waits for, read from its source |
| `startup_barrier` | TCP barrier before JAX's runtime starts |
| `connections` | TCP connections that stay open, and detection of killed peers |
| `dump_folder` | temporary folders that are removed even after their process is killed |
| `job_pool` | worker processes for jobs that may crash; `job_worker` is their program |
"""

from xlashard.core.processes.equality import NamedValue as NamedValue
from xlashard.core.processes.equality import ValueDifference as ValueDifference
from xlashard.core.processes.equality import differences as differences
from xlashard.core.processes.equality import digest as digest
from xlashard.core.processes.equality import digest_of_all as digest_of_all
from xlashard.core.processes.equality import format_differences as format_differences
from xlashard.core.processes.equality import minority as minority
from xlashard.core.processes.rendezvous import RENDEZVOUS as RENDEZVOUS
from xlashard.core.processes.rendezvous import Barrier as Barrier
from xlashard.core.processes.rendezvous import BarrierTimeoutError as BarrierTimeoutError
from xlashard.core.processes.rendezvous import checked_seconds as checked_seconds
from xlashard.core.processes.rendezvous import processes_of as processes_of
