// Ranks that pass a token around and add up what each has, round after round; in the end each writes what it has come to.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int rank, size, rounds = argc > 1 ? atoi(argv[1]) : 1000;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    unsigned long token = 1, own = rank + 1, all = 0, sum = 0;
    unsigned long *many = calloc(20000, sizeof *many), *added = calloc(20000, sizeof *added);
    for (int n = 0; n < rounds; n++) {
        int next = (rank + 1) % size, before = (rank + size - 1) % size;
        if (rank == 0) {
            MPI_Send(&token, 1, MPI_UNSIGNED_LONG, next, n, MPI_COMM_WORLD);
            MPI_Recv(&token, 1, MPI_UNSIGNED_LONG, before, n, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        } else {
            MPI_Recv(&token, 1, MPI_UNSIGNED_LONG, before, n, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            token = token * 31 + rank;
            MPI_Send(&token, 1, MPI_UNSIGNED_LONG, next, n, MPI_COMM_WORLD);
        }
        MPI_Allreduce(&own, &all, 1, MPI_UNSIGNED_LONG, MPI_SUM, MPI_COMM_WORLD);
        own = own * 6364136223846793005ul + all + token;
        sum += token ^ all;
        if (n % 50 == 0) { // messages that do not fit into what they share at once
            for (int i = 0; i < 20000; i++) many[i] = own + i;
            MPI_Allreduce(many, added, 20000, MPI_UNSIGNED_LONG, MPI_BXOR, MPI_COMM_WORLD);
            for (int i = 0; i < 20000; i++) sum = sum * 31 + added[i];
        }
        usleep(1000);
    }
    char name[32];
    snprintf(name, sizeof name, "rank.%d", rank);
    FILE *file = fopen(name, "w");
    fprintf(file, "%d of %d: %lx %lx %lx\n", rank, size, token, own, sum);
    fclose(file);
    unsigned long total = 0;
    MPI_Reduce(&sum, &total, 1, MPI_UNSIGNED_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) printf("%lx\n", total);
    MPI_Finalize();
    return 0;
}
