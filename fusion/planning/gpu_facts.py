"""Facts of compiled GPU kernels, written by `benchmarks/tile_facts.py` on 2026-11-22 with
Triton 3.7.1; not to be edited.

FACTS: (architecture, kernel, kind of program, d, d_v) -> (rows, keys, warps, stages, rotated) -> (bytes of shared
memory, registers of a thread, instructions of the main loop, those of them that spill, serialised products); 16-bit
products, d and d_v as they are computed. `fusion.planning.gpu_feasible` reads them.
"""

TRITON = "3.7.1"

Facts = dict[tuple[int, int, int, int, bool], tuple[int, int, int, int, bool]]

# fmt: off
FACTS: dict[tuple[str, str, str, int, int], Facts] = {
    ('sm_90', 'attention_backward_keys', 'listed', 64, 64): {
        (64, 128, 8, 2, False): (66816, 241, 531, 0, False),
    },
    ('sm_90', 'attention_backward_keys', 'listed', 128, 128): {
        (64, 128, 8, 2, False): (132352, 255, 632, 1, False),
    },
    ('sm_90', 'attention_backward_keys', 'masked', 64, 64): {
        (64, 128, 8, 2, False): (66304, 255, 530, 0, False),
    },
    ('sm_90', 'attention_backward_keys', 'masked', 128, 128): {
        (64, 128, 8, 2, False): (131840, 255, 638, 1, False),
    },
    ('sm_90', 'attention_backward_keys', 'masked', 256, 256): {
        (16, 64, 4, 2, False): (98496, 255, 713, 256, True),
        (16, 128, 8, 2, False): (164032, 255, 672, 256, True),
        (32, 64, 4, 2, False): (131456, 255, 891, 257, True),
        (32, 64, 8, 2, False): (131456, 255, 677, 8, False),
        (32, 128, 8, 2, False): (196992, 255, 806, 256, True),
        (64, 64, 8, 2, False): (197632, 255, 999, 49, False),
    },
    ('sm_90', 'attention_backward_keys', 'matrix', 64, 64): {
        (64, 128, 8, 2, False): (70400, 240, 667, 0, False),
    },
    ('sm_90', 'attention_backward_keys', 'matrix', 128, 128): {
        (32, 128, 8, 2, False): (102784, 244, 439, 0, False),
        (64, 128, 8, 2, False): (135936, 255, 876, 20, False),
    },
    ('sm_90', 'attention_backward_keys', 'plain', 64, 64): {
        (64, 128, 8, 2, False): (66304, 234, 507, 0, False),
        (128, 128, 8, 2, False): (100352, 255, 1049, 116, False),
    },
    ('sm_90', 'attention_backward_keys', 'plain', 128, 128): {
        (64, 128, 8, 2, False): (131840, 255, 608, 2, False),
        (128, 128, 8, 2, False): (198656, 255, 1533, 427, False),
    },
    ('sm_90', 'attention_backward_keys', 'plain', 256, 256): {
        (16, 64, 4, 2, False): (98496, 255, 647, 256, True),
        (16, 128, 8, 2, False): (164032, 255, 630, 256, True),
        (32, 64, 4, 2, False): (131456, 255, 790, 256, True),
        (32, 128, 8, 2, False): (196992, 255, 752, 256, True),
        (64, 64, 8, 2, False): (197632, 255, 901, 16, False),
        (128, 64, 8, 1, False): (196608, 255, 1926, 464, False),
    },
    ('sm_90', 'attention_backward_keys', 'terms', 64, 64): {
        (64, 128, 8, 2, False): (66304, 246, 675, 0, False),
    },
    ('sm_90', 'attention_backward_keys', 'terms', 128, 128): {
        (32, 128, 8, 2, False): (98688, 235, 763, 0, False),
        (64, 64, 4, 2, False): (99328, 255, 862, 7, False),
        (64, 128, 8, 2, False): (131840, 255, 800, 17, False),
    },
    ('sm_90', 'attention_backward_queries', 'listed', 64, 64): {
        (128, 64, 4, 2, False): (66048, 255, 627, 2, False),
    },
    ('sm_90', 'attention_backward_queries', 'listed', 128, 128): {
        (128, 64, 8, 2, False): (131584, 209, 429, 0, False),
    },
    ('sm_90', 'attention_backward_queries', 'masked', 64, 64): {
        (128, 32, 8, 3, False): (57344, 118, 203, 0, False),
        (128, 64, 4, 2, False): (65536, 255, 632, 37, False),
    },
    ('sm_90', 'attention_backward_queries', 'masked', 128, 128): {
        (128, 64, 8, 2, False): (131072, 213, 407, 0, False),
    },
    ('sm_90', 'attention_backward_queries', 'masked', 256, 256): {
        (64, 64, 4, 2, False): (196608, 255, 618, 2, False),
    },
    ('sm_90', 'attention_backward_queries', 'matrix', 64, 64): {
        (128, 64, 8, 2, False): (114688, 254, 584, 0, False),
        (128, 128, 8, 2, False): (196608, 255, 1173, 24, False),
    },
    ('sm_90', 'attention_backward_queries', 'matrix', 128, 128): {
        (128, 64, 8, 2, False): (180224, 255, 622, 0, False),
    },
    ('sm_90', 'attention_backward_queries', 'plain', 64, 64): {
        (128, 128, 8, 2, False): (98304, 254, 557, 0, False),
    },
    ('sm_90', 'attention_backward_queries', 'plain', 128, 128): {
        (128, 128, 8, 2, False): (196608, 242, 714, 0, False),
    },
    ('sm_90', 'attention_backward_queries', 'plain', 256, 256): {
        (64, 64, 4, 2, False): (196608, 255, 618, 0, False),
    },
    ('sm_90', 'attention_backward_queries', 'terms', 64, 64): {
        (128, 64, 8, 2, False): (65536, 190, 444, 0, False),
        (128, 128, 8, 2, False): (98304, 254, 2167, 0, False),
    },
    ('sm_90', 'attention_backward_queries', 'terms', 128, 128): {
        (128, 64, 8, 2, False): (131072, 225, 519, 0, False),
        (128, 128, 8, 2, False): (196608, 252, 2328, 0, False),
    },
    ('sm_90', 'attention_forward', 'listed', 64, 64): {
        (128, 64, 4, 2, False): (49664, 241, 537, 0, False),
        (128, 128, 4, 2, False): (82944, 255, 944, 31, True),
    },
    ('sm_90', 'attention_forward', 'listed', 128, 128): {
        (128, 64, 8, 2, False): (98816, 195, 368, 0, False),
    },
    ('sm_90', 'attention_forward', 'masked', 64, 64): {
        (128, 64, 8, 3, False): (65536, 125, 312, 0, False),
    },
    ('sm_90', 'attention_forward', 'masked', 128, 128): {
        (128, 64, 8, 3, True): (131072, 220, 371, 0, False),
        (128, 128, 8, 2, True): (163840, 255, 603, 0, True),
    },
    ('sm_90', 'attention_forward', 'masked', 256, 256): {
        (128, 64, 8, 2, False): (196608, 252, 687, 0, False),
        (128, 64, 8, 2, True): (196608, 255, 763, 0, True),
    },
    ('sm_90', 'attention_forward', 'masked', 576, 512): {
        (64, 32, 4, 2, True): (147456, 255, 1036, 256, True),
        (64, 64, 4, 2, False): (221184, 255, 1420, 304, True),
        (64, 128, 8, 1, True): (221184, 255, 1655, 197, False),
        (128, 32, 8, 2, False): (221184, 255, 1511, 544, True),
        (128, 32, 8, 2, True): (221184, 255, 1511, 544, True),
        (128, 64, 8, 1, False): (221184, 255, 1816, 602, True),
    },
    ('sm_90', 'attention_forward', 'matrix', 64, 64): {
        (128, 128, 8, 2, False): (114688, 220, 694, 0, False),
    },
    ('sm_90', 'attention_forward', 'matrix', 128, 128): {
        (128, 128, 8, 2, False): (196608, 255, 789, 0, False),
    },
    ('sm_90', 'attention_forward', 'plain', 64, 64): {
        (128, 64, 8, 3, False): (65536, 123, 301, 0, False),
        (128, 128, 8, 2, True): (81920, 243, 486, 0, True),
    },
    ('sm_90', 'attention_forward', 'plain', 128, 128): {
        (128, 64, 8, 3, True): (131072, 208, 358, 0, False),
        (128, 128, 8, 2, True): (163840, 255, 554, 0, True),
    },
    ('sm_90', 'attention_forward', 'plain', 256, 256): {
        (128, 64, 8, 2, False): (196608, 246, 534, 0, False),
        (128, 64, 8, 2, True): (196608, 252, 574, 0, True),
        (128, 128, 8, 1, True): (131072, 255, 1206, 334, False),
    },
    ('sm_90', 'attention_forward', 'terms', 64, 64): {
        (128, 64, 8, 3, True): (65536, 188, 430, 0, False),
        (128, 128, 8, 2, False): (81920, 244, 1878, 0, False),
        (128, 128, 8, 2, True): (81920, 255, 760, 0, True),
    },
    ('sm_90', 'attention_forward', 'terms', 128, 128): {
        (128, 64, 8, 2, False): (98304, 211, 492, 0, False),
        (128, 64, 8, 2, True): (98304, 231, 514, 0, True),
        (128, 128, 8, 2, False): (163840, 244, 1946, 0, False),
        (128, 128, 8, 2, True): (163840, 255, 904, 42, True),
    },
}
