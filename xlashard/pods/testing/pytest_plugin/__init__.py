"""Implementation of the pytest marker `pod`, which runs a test in every process of a pod.

| modules | contents |
|---|---|
| `controller` | the side of the pytest process that the user started, which merges the reports |
| `in_worker` | the side of the pytest session inside each worker |
| `process_state` | what a test may change in its worker, and the restoration of it |
"""
