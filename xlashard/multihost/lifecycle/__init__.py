"""Lifecycle of a multi-process program: detect the cluster, join it, watch the peers, shut down.

| modules | contents |
|---|---|
| `initialize` | the public entry points `initialize` and `leave` |
| `cluster_info`, `environments` | cluster detection, and launch commands |
| `join` | wait for every process before JAX's runtime starts |
| `shutdown`, `peer_failure` | exit of this process, and of peers that failed |
| `watchdog`, `hang_report` | detection of a stalled program, and a report of the stalled process |
"""
