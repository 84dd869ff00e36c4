"""Says whether a TPU is there, free and whole, and what to do if not.

    doctor.py --name=my-tpu --zone=us-west4-a --accelerator=v5litepod-16    all its workers
    doctor.py                                                               this machine alone

It looks at the chips, who holds them, versions, memory, the way to the coordinator, and whether all
workers see all chips. It exits with 1 if something is wrong.
"""

from xlashard.cloud.doctoring import look
from xlashard.cloud.script import start

if __name__ == "__main__":
    start(lambda session, _: look(session), ("tpu", "wait", "setup", "run", "doctor"), __doc__)
