"""What the CPU computes, as machine code: one job a file, each over a range of rows.

Every kernel follows the steps of ``fp4rt.format`` in the same order as ``fp4rt.cpu.reference``, and gives the same
bits. Rows are independent, so that threads share a matrix by rows; a kernel writes all bytes of its rows.

Matrices come as ``flat``, the 1-D memory that holds them, with the element where they start and two strides: any
strides are then one case, and the common one, adjacent columns, is plain indexing that vectorizes.
"""
