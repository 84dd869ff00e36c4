"""Programs that agree: the processes of one compare it before they run it for the first time.

| modules | what is in them |
|---|---|
| `terms` | what they must have in common, as a digest and, for errors, in words |
| `subject` | what a process says when it comes |
| `group` | coming together, and what follows |
| `agreements` | all groups of this process, and whether and how long it looks for them |
| `difference`, `listing`, `message` | in what two programs differ, down to the line of Python |
"""

from xlashard.program.agreement.agreements import AGREEMENTS, Agreements, Policy, is_shared
from xlashard.program.agreement.terms import ClosedOver, Naming, Terms

__all__ = ["AGREEMENTS", "Agreements", "ClosedOver", "Naming", "Policy", "Terms", "is_shared"]
