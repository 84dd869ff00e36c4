"""Jobs on TPUs in Google Cloud: the steps of the scripts in `tpu_scripts/`, as calls of `gcloud`.

| modules | content |
|---|---|
| `cloud_settings` | settings, types of TPUs; the manifest of a job on GKE |
| `session` | flags and exit codes of a script; its commands of gcloud, run or printed |
| `tpu` | state of a TPU, creating and deleting it; commands and code on its workers |
| `jobs` | a job on all workers; the same job again after a preemption |
| `doctor` | checks of the workers, and advice |
| `remote/` | programs that are copied to the workers and run there without xlashard |
"""
