# getpid of 32-bit programs, through the gate that they use: the numbers of a filter mean other calls there.
import ctypes, mmap, os, signal

code = bytes.fromhex("b814000000cd80c3")
if os.uname().machine != "x86_64":
    print("ESCAPED: not asked on this machine" if {{CONTROL}} else "DONE")
    raise SystemExit
page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
page.write(code)
child = os.fork()
if child == 0:
    call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    os._exit(42 if call() > 0 else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
if status == 42:
    print("ESCAPED: a call of another architecture")
print(status, "DONE")
