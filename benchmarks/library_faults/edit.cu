// Change elements of a matrix that a library has just written: flip and keep bits of one element in `step`.
extern "C" __global__ void edit(char *data, unsigned long long rows, unsigned long long lead, unsigned long long cols,
    unsigned long long total, unsigned long long stride, unsigned long long first, unsigned long long step,
    unsigned size, unsigned flip, unsigned keep)
{
    unsigned long long i = first + step * (blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x);
    if (i >= total) return;
    unsigned long long e = i / (rows * cols) * stride + i / rows % cols * lead + i % rows;
    if (size == 4) { unsigned *p = (unsigned *)data + e; *p = (*p ^ flip) & keep; }
    else if (size == 2) { unsigned short *p = (unsigned short *)data + e; *p = (*p ^ flip) & keep; }
    else { unsigned char *p = (unsigned char *)data + e; *p = (*p ^ flip) & keep; }
}
