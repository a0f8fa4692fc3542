"""A CUDA device emulated on the CPU, for all that a GPU changes beside speed; docs/kernels.md says what it cannot tell.

    python -m tests.device.emulator SCRIPT [ARGUMENT ...]                    Triton launches are checked and left out
    TRITON_INTERPRET=1 python -m tests.device.emulator SCRIPT ...            Triton's interpreter runs the kernels
    pytest -p tests.device.emulator.plugin tests/gpu                         tests, either way

`emulator.cpp` is the device (build.py compiles it once), `surface.py` what torch.cuda answers, `counting.py` what is
counted, `launches.py` what becomes of Triton kernels.
"""
