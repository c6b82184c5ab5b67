import os

for folder in ("/usr/bin", "/usr/lib"):
    if not os.statvfs(folder).f_flag & os.ST_NOSUID:
        print("ESCAPED: set-user-id programs count in", folder)
print("DONE")
