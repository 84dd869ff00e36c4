"""Jobs on TPUs in Google Cloud: what the scripts of `tpu_scripts/` do.

| modules | what is in them |
|---|---|
| `settings`, `accelerators` | what a person asks for, and what its name means to Google Cloud |
| `commands`, `retrying`, `session` | commands as values, what runs or shows them, trying again |
| `gcloud`, `slices` | TPU VMs: commands that make and reach them, and what they are said to be |
| `provisioning` | making a TPU, waiting for it, deleting it |
| `reaching`, `preparing`, `bundle` | the same on all workers at once; code and packages for them |
| `jobs`, `running`, `following`, `logs` | a job on all workers: start, follow and end it |
| `watching`, `resuming` | the same on a TPU that may be taken away |
| `jobset`, `kubectl`, `gke` | a job as a JobSet of GKE |
| `doctoring`, `findings` | looking at a TPU, and saying what is wrong |
| `remote/` | what is copied to the workers and runs there, without any of this |
| `script` | flags, help and exit codes of a script |
"""
