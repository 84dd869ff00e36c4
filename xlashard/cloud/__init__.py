"""Jobs on TPUs in Google Cloud: the steps of the scripts in `tpu_scripts/`, as calls of `gcloud`.

| modules | content |
|---|---|
| `cloud_settings`, `script` | settings, types of TPUs; flags and exit codes |
| `session` | commands of gcloud as values, and the object that runs or prints them |
| `tpu`, `workers` | state of a TPU, creating and deleting it; commands and code on its workers |
| `jobs` | a job on all workers; the same job again after a preemption |
| `jobset` | the manifest of a job on GKE |
| `doctor` | checks of the workers, and advice |
| `remote/` | programs that are copied to the workers and run there without xlashard |
"""
