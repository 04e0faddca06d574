"""Runs the source of our CUDA kernels on the CPU: one thread per CUDA thread, block after block, compiled by the C++ compiler.

What it covers is what the source says: indexing, masking, the order of sums, what is never read. Speed and what nvcc makes of it are
for a GPU. The tensor core instruction stands here as its definition. bfloat16 values are their bits, as uint16.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

_PRELUDE = r"""
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
using std::min;
struct Dim { unsigned x, y, z; };
thread_local Dim threadIdx, blockIdx;
static Dim gridDim;
struct Warp { std::barrier<> met{32}; float lanes[32]; uint32_t a[32][4], b[32][2]; };
static std::vector<std::unique_ptr<Warp>> warps;
static std::unique_ptr<std::barrier<>> block;
static void __syncthreads() { block->arrive_and_wait(); }
static float __shfl_xor_sync(unsigned, float value, int step) {
  Warp& warp = *warps[threadIdx.x / 32];
  warp.lanes[threadIdx.x % 32] = value;
  warp.met.arrive_and_wait();
  float out = warp.lanes[(threadIdx.x % 32) ^ step];
  warp.met.arrive_and_wait();
  return out;
}
struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(float x) { uint32_t w; memcpy(&w, &x, 4); bits = (w + 0x7fff + ((w >> 16) & 1)) >> 16; }
  operator float() const { uint32_t w = uint32_t(bits) << 16; float x; memcpy(&x, &w, 4); return x; }
};
static float half_of(uint32_t word, int which) { BFloat16 x; x.bits = which ? word >> 16 : word & 0xffff; return x; }
#define __device__
#define __shared__ static
struct alignas(16) uint4 { uint32_t x, y, z, w; };
static uint4 __ldcs(const uint4* from) { return *from; }
struct alignas(16) Eight;
"""

_TENSOR_CORE = r"""
template <typename T>
void multiply(float (&sums)[4], const Eight& low, const Eight& high, const Eight& cols, int at) {
  Warp& warp = *warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  uint32_t* a = warp.a[lane];
  a[0] = low.words[at], a[1] = high.words[at], a[2] = low.words[at + 1], a[3] = high.words[at + 1];
  warp.b[lane][0] = cols.words[at], warp.b[lane][1] = cols.words[at + 1];
  warp.met.arrive_and_wait();
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, col = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 16; ++k)
      sums[e] += half_of(warp.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) * half_of(warp.b[col * 4 + k % 8 / 2][k / 8], k % 2);
  }
  warp.met.arrive_and_wait();
}
"""

_LAUNCH = r"""
extern "C" void launch(void** args, unsigned x, unsigned y, unsigned z, unsigned threads) {
  gridDim = {x, y, z};
  for (unsigned i = 0; i < x * y * z; ++i) {
    warps.clear();
    for (unsigned w = 0; w < (threads + 31) / 32; ++w) warps.emplace_back(new Warp);
    block.reset(new std::barrier<>(threads));
    std::vector<std::thread> running;
    for (unsigned t = 0; t < threads; ++t) running.emplace_back([=] {
      threadIdx = {t, 0, 0};
      blockIdx = {i % x, i / x % y, i / (x * y)};
      kernel(ARGUMENTS);
    });
    for (std::thread& thread : running) thread.join();
  }
}
"""

_TYPES = {np.dtype(np.int32): "int32_t", np.dtype(np.float32): "float", np.dtype(np.uint16): "BFloat16"}


def bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of the nearest bfloat16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def wide(bits: np.ndarray) -> np.ndarray:
    """The bits of bfloat16 values as float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def run(
    folder: Path,
    source: str,
    header: str,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
    constants: Mapping[str, int],
    grid: Sequence[int],
    threads: int,
) -> None:
    """Launch one kernel as `mx.fast.cuda_kernel` would, with T = bfloat16; grid in blocks. `outputs` are written in place."""
    before, _, after = header.partition("template <typename T>\n__device__ void multiply")
    header = before + (_TENSOR_CORE if after else "")
    parameters, arguments, keep = [], [], []
    for name, array in {**inputs, **outputs}.items():
        parameters.append(f"{'' if name in outputs else 'const '}{_TYPES[array.dtype]}* {name}")
        keep.append(array)
        for suffix, values, kind in (("shape", array.shape, np.int32), ("strides", [s // array.itemsize for s in array.strides], np.int64)):
            if name in inputs and f"{name}_{suffix}" in source:
                parameters.append(f"const {'int32_t' if kind is np.int32 else 'int64_t'}* {name}_{suffix}")
                keep.append(np.array(values, kind))
    kinds = [p.rsplit(" ", 1)[0] for p in parameters]
    arguments = ", ".join(f"({kind})args[{i}]" for i, kind in enumerate(kinds))
    names = "".join(f"constexpr int {name} = {value};\n" for name, value in constants.items())
    body = f"static void kernel({', '.join(parameters)}) {{\nusing T = BFloat16;\n{names}{source}\n}}\n"
    text = _PRELUDE + header + body + _LAUNCH.replace("ARGUMENTS", arguments)
    (folder / "kernel.cpp").write_text("\n".join(line for line in text.splitlines() if not line.strip().startswith("#pragma unroll")))
    library = folder / "kernel.so"
    command = ["g++", "-std=c++20", "-O1", "-pthread", "-w", "-shared", "-fPIC", "-o", str(library), str(folder / "kernel.cpp")]
    subprocess.run(command, check=True)
    pointers = (ctypes.c_void_p * len(keep))(*(array.ctypes.data for array in keep))
    ctypes.CDLL(str(library)).launch(pointers, *grid, threads)
