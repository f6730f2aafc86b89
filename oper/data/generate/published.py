"""Published figures of real workloads, to which synthetic tables are calibrated.

Criteo Kaggle (Display Advertising Challenge): distinct values of C1..C26. Criteo 1TB: rows of the
24 days, and by column the number of distinct values and of values seen at least three times (from
dlrm and torchrec_dlrm). MLPerf DLRM-v2: cap on the rows of a table, and ids per bag by column.
Meta's embedding_bag traces of 2021: histogram of accesses per touched row, as shares of the rows
and of the accesses, in one batch of 65,536 samples (from dlrm_datasets, MIT).
"""

CRITEO_KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992,
    5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572)
CRITEO_1TB_ROWS = 4_373_472_329
CRITEO_1TB_DISTINCT = (
    227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10, 2209,
    11938, 155, 4, 976, 14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36)
CRITEO_1TB_FREQUENT = (
    45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10, 2209,
    11267, 128, 4, 974, 14, 48937457, 11316796, 40094537, 452104, 12606, 104, 35)
MLPERF_MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1,
                    1)
MLPERF_CAP = 40_000_000
# The trace fbgemm_t856_bs65536: 856 tables pooled.
META_2021_INDICES, META_2021_ROWS = 887_017_990, 128_435_723
META_2021_ROW_SHARES = (
    0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001, 0, 0, 0, 0, 0, 0, 0)
META_2021_ACCESS_SHARES = (
    0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052, 0.05, 0.049, 0.048, 0.048, 0.043,
    0.031, 0.023, 0.019)
