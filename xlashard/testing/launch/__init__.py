"""Launch of the processes of an emulated pod, and supervision until they exit.

| modules | contents |
|---|---|
| `pod_command` | the command `xlashard pod` |
| `launcher`, `guard`, `pipes` | start, events and termination of the processes |
| `pod_environment` | environment variables of each process |
| `supervision` | timeouts, grace periods and the final verdict |
| `output_text`, `prefix_printer` | filtering and display of output |
"""
