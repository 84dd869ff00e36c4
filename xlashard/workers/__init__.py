"""Worker processes for jobs that may crash, and their temporary folders.

| modules | contents |
|---|---|
| `job_pool`, `job_worker` | the processes, and the program that they run |
| `dump_folder` | temporary folders that are removed even after their process is killed |
"""
