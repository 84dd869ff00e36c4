"""Opens a shell on one worker of a TPU, or runs a command there.

ssh.py 0 --name=my-tpu --zone=us-west4-a           a shell on worker 0
ssh.py 1.3 --name=my-tpu -- nproc                  a command on worker 3 of slice 1
"""

from xlashard.cloud.running import ssh
from xlashard.cloud.script import start

if __name__ == "__main__":
    start(lambda session, words: ssh(session, words), ("tpu", "wait"), __doc__)
