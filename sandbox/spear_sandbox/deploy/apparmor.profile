# AppArmor's part of the sandbox's container. Docker's own profile denies mounts, which each run needs; this one allows
# them. Load it on every machine, and name it:
#
#   sudo apparmor_parser -r -W apparmor.profile
#   docker run --security-opt apparmor=spear-sandbox …       (compose.yaml: SPEAR_APPARMOR=spear-sandbox)
#
# The rules of 3.0 know nothing of user namespaces, so they neither deny them nor need a word on them.
abi <abi/3.0>,

#include <tunables/global>

profile spear-sandbox flags=(attach_disconnected,mediate_deleted) {
  #include <abstractions/base>

  # The service, and the programs, whose network namespace is empty.
  network inet,
  network inet6,
  network unix,
  network netlink raw,

  # The container has none; a run's launcher has them in its own user namespace, where it builds the run's root.
  capability,
  mount,
  remount,
  umount,
  pivot_root,

  file,
  # Of /proc/sys, a run's own limit of user namespaces is all that is written.
  deny @{PROC}/sys/{abi,debug,dev,fs,kernel,net,vm}/** w,
  deny @{PROC}/sysrq-trigger rwklx,
  deny @{PROC}/kcore rwklx,
  deny /sys/{block,bus,class,dev,devices,firmware,hypervisor,kernel,module,power}/** wklx,
  deny /sys/firmware/** rwklx,
  deny /sys/kernel/security/** rwklx,
  deny /sys/devices/virtual/powercap/** rwklx,

  # `docker stop` comes from outside; all else stays within.
  signal (receive) peer=unconfined,
  signal (receive) peer={runc,crun,docker-default},
  signal (send, receive) peer=spear-sandbox,
  ptrace (trace, tracedby, read, readby) peer=spear-sandbox,
}
