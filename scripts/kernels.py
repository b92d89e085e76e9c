"""Compiles the kernels of crates/gpu/kernels from CUDA to PTX with NVRTC, whose folder is the first argument.

The second argument is the output folder of the .ptx files. The first line of each source names its architecture, and the
second may list the number types it is compiled for, each into a separate file: the driver compiles files in parallel.
"""

import ctypes
import pathlib
import sys

KERNELS = pathlib.Path(__file__).resolve().parent.parent / "crates/gpu/kernels"


def compiled(nvrtc, source, text, number):
    first = text.splitlines()[0]
    prefix = "// arch: "
    if not first.startswith(prefix):
        sys.exit(f"{source.name}: the first line must be '{prefix}compute_80' or another architecture")
    options = [
        f"--gpu-architecture={first.removeprefix(prefix)}",
        "--std=c++17",
        # Nothing is fused, reordered or flushed unless the source says so: results have the same bits with every driver.
        "--fmad=false",
        "--ftz=false",
        "--prec-div=true",
        "--prec-sqrt=true",
    ]
    if number:
        options.append(f"--define-macro=NUMBER={number}")
    shared = sorted(KERNELS.glob("*.cuh"))
    headers = [header.read_bytes() for header in shared]
    names = [header.name.encode() for header in shared]
    program = ctypes.c_void_p()
    check(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            text.encode(),
            source.name.encode(),
            len(headers),
            (ctypes.c_char_p * len(headers))(*headers),
            (ctypes.c_char_p * len(names))(*names),
        ),
    )
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    result = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    if result != 0:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        sys.exit(f"{source.name} does not compile:\n{log.value.decode()}")
    size = ctypes.c_size_t()
    check(nvrtc, nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)))
    ptx = ctypes.create_string_buffer(size.value)
    check(nvrtc, nvrtc.nvrtcGetPTX(program, ptx))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx.value.decode()


def check(nvrtc, result):
    if result != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        sys.exit(nvrtc.nvrtcGetErrorString(result).decode())


def without_comments(ptx):
    """Removes the compiler's header comments and unused internal constants from PTX."""
    lines = [line.rstrip() for line in ptx.splitlines()]
    kept = [line for line in lines if line and not line.startswith("//") and "nv6target6detail" not in line]
    return "\n".join(kept) + "\n"


def main():
    folder, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    (library,) = folder.glob("libnvrtc.so.*")
    nvrtc = ctypes.CDLL(str(library))
    for source in sorted(KERNELS.glob("*.cu")):
        text = source.read_text()
        second = text.splitlines()[1]
        prefix = "// numbers: "
        numbers = second.removeprefix(prefix).split() if second.startswith(prefix) else [None]
        for number in numbers:
            name = f"{source.stem}_{number}" if number else source.stem
            (out / f"{name}.ptx").write_text(without_comments(compiled(nvrtc, source, text, number)))


if __name__ == "__main__":
    main()
