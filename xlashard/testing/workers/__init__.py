"""Worker processes of an emulated pod that stay alive and serve requests.

| modules | contents |
|---|---|
| `worker_pool` | start of the workers, requests and replies |
| `pool_result` | replies, output and failures of one request, and the error made from them |
| `channel` | pickled messages over a socket |
| `function_lookup` | import of a function by module and qualified name |
| `bootstrap`, `pod_worker` | the code that runs in a worker |
"""
