import os, resource, signal, time

target = {{SUPERVISOR}}
for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU):
    try:
        soft, hard = resource.prlimit(target, which)
        resource.prlimit(target, which, (soft, hard) if {{GENTLY}} else (1, 1))
        print("ESCAPED: the limits of", target)
    except OSError as error:
        print(error)
try:
    os.setpriority(os.PRIO_PROCESS, target, os.getpriority(os.PRIO_PROCESS, target) if {{GENTLY}} else 19)
    print("ESCAPED: the priority of", target)
except OSError as error:
    print(error)
if not {{GENTLY}}:
    for number in range(1, 32):
        try:
            os.kill(target, number)
        except OSError:
            pass
    time.sleep(0.3)
print("DONE")
