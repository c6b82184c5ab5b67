"""What runs inside the isolation: the way in, the warm interpreter, the supervisor of a run, and the run itself.

These modules import only the standard library and each other. The folder is bound into the sandbox, so nothing in it is
secret.
"""
