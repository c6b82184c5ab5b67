import resource

for name, least in (("RLIMIT_NOFILE", 512), ("RLIMIT_CORE", 1 << 20)):
    which = getattr(resource, name)
    try:
        resource.setrlimit(which, (least, max(least, resource.getrlimit(which)[1])))
        print("ESCAPED:", name, resource.getrlimit(which))
    except (OSError, ValueError) as error:
        print(name, error)
print("DONE")
