import importlib, sys

for name in ("spear_envs", "spear_sandbox", "pytest"):
    try:
        module = importlib.import_module(name)
        if getattr(module, "__file__", None):
            print("ESCAPED:", module.__file__)
    except ImportError as error:
        print(error)
print("DONE")
