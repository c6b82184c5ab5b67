"""What runs behind the isolation: the way in, the warm interpreter, the supervisor of a run, and the run itself.

These modules know the standard library and each other only. The folder is bound into the sandbox, so nothing in it is
secret.
"""
