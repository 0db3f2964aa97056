"""Who does tasks that do not depend on each other, and where: this process, or Ray's actors on many machines."""
