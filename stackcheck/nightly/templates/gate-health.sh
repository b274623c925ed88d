#!/bin/sh
# Slurm's HealthCheckProgram. Slurm kills it after 60 s, and ignores its exit code<< "" if wanted.drain else ": it only writes the log" >>.
PATH=/usr/sbin:/usr/bin:/sbin:/bin:$PATH
said=$(<< line >> 2>><< wanted.log >>)
code=$?
echo "$said" >><< wanted.log >>
exit $code
