# SPDX-License-Identifier: Apache-2.0
"""GPUs that are not at hand, by their architecture."""

from portable_backend.device import ARCH_LIMITS, DeviceInfo

# Units of the GPUs of an architecture, from vendors' data sheets; twice where drivers
# count pairs. A default config depends on no more of a GPU than this and its arch.
_NUM_UNITS = {
    "sm80": (56, 108),  # A30, A100
    "sm86": (72, 84),  # A10, A40 and A6000
    "sm89": (58, 128, 142),  # L4, RTX 4090, L40 and L40S
    "sm90": (78, 114, 132),  # H20, H100 PCIe, H100 and H200
    "sm100": (148,),  # B200
    "sm120": (170, 188),  # RTX 5090, RTX PRO 6000
    "gfx90a": (104, 110),  # MI210 and MI250, MI250X
    "gfx942": (80, 228, 304),  # MI308X, MI300A, MI300X and MI325X
    "gfx950": (256,),  # MI350X and MI355X
    "gfx1100": (42, 48, 84, 96),  # RX 7900 XT, RX 7900 XTX and W7900
    "gfx1201": (28, 32, 56, 64),  # RX 9070, RX 9070 XT
}
TARGETS = tuple(_NUM_UNITS)


def devices_of(arch: str) -> list[DeviceInfo]:
    """The GPUs of an architecture that we know, as far as configs can tell them apart.

    Raises:
        ValueError: no such architecture; the message lists all.
    """
    return [DeviceInfo.for_arch(arch, n) for n in _NUM_UNITS.get(arch, (1,))]


# GPUs for which there are tables that nobody has measured, (architecture, units) each;
# others of as many units are served by the same table.
_UNMEASURED = {
    "nvidia_a100": ("sm80", 108),  # also A800
    "nvidia_a10": ("sm86", 72),
    "nvidia_rtx_a6000": ("sm86", 84),  # also A40
    "nvidia_l4": ("sm89", 58),
    "nvidia_l40s": ("sm89", 142),  # also L40, RTX 6000 Ada
    "nvidia_h100": ("sm90", 132),
    "nvidia_b200": ("sm100", 148),
    "nvidia_rtx_5090": ("sm120", 170),
    "nvidia_rtx_pro_6000": ("sm120", 188),
    "amd_instinct_mi250x": ("gfx90a", 110),  # of one die; also MI210 and MI250, 104
    "amd_instinct_mi300a": ("gfx942", 228),
    "amd_instinct_mi300x": ("gfx942", 304),  # also MI325X
    "amd_instinct_mi355x": ("gfx950", 256),  # also MI350X
    "amd_radeon_rx_7900_xtx": ("gfx1100", 48),
    "amd_radeon_rx_9070_xt": ("gfx1201", 32),
}


def unmeasured_devices() -> list[DeviceInfo]:
    """The GPUs of which tables are predicted, since none of them is at hand."""
    return [
        DeviceInfo(name, arch, num_units, ARCH_LIMITS[arch])
        for name, (arch, num_units) in _UNMEASURED.items()
    ]
