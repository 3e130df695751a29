"""Folders that compute nodes probably cannot see: on a disk of this machine while the cluster has other machines. A guess, so a warning."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from specforge.launch import slurm_queue

# File systems that belong to one machine. What is not in the list (nfs, lustre, gpfs, beegfs, ceph, …) is taken for shared.
LOCAL_FILESYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "f2fs", "jfs", "vfat", "exfat", "squashfs"}


def unseen_folders(folders: Mapping[str, Path]) -> list[str]:
    """One sentence for each folder that lies on a disk of this machine; empty when every node is this machine."""
    if not _other_machines():
        return []
    mounts = Path("/proc/self/mountinfo")
    table = mounts.read_text() if mounts.exists() else ""
    found = []
    for name, folder in folders.items():
        kind, mount = filesystem(folder, table)
        if kind in LOCAL_FILESYSTEMS:
            found.append(
                f"{name} {folder} is on a disk of this machine ({kind} at {mount}); nodes of the cluster may not see it. "
                "Put it on a shared disk (output_dir=, cache_dir=)."
            )
    return found


def filesystem(folder: Path, mountinfo: str) -> tuple[str, str]:
    """Type and mount point of the file system that a folder is on, by the kernel's table; empty if it is not in there."""
    path = next((p for p in (folder.absolute(), *folder.absolute().parents) if p.exists()), Path("/")).resolve()
    best = ("", "")
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        mount = fields[4].encode().decode("unicode_escape")
        if path.is_relative_to(mount) and len(mount) >= len(best[1]):
            best = right.split()[0], mount
    return best


def _other_machines() -> bool:
    try:
        addresses = slurm_queue.node_addresses()
    except slurm_queue.SlurmError:
        return True
    return any(not _is_here(address) for address in addresses)


def _is_here(address: str) -> bool:
    """Whether an address of a node is this machine's."""
    return address in ("localhost", "127.0.0.1", "::1", *_own_names())


def _own_names() -> Iterable[str]:
    name = socket.gethostname()
    return name, name.split(".")[0], socket.getfqdn()
