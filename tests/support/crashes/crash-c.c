/* Reads a number, and crashes in a thread if it is 2: at an address that is not mapped. */
#include <pthread.h>
#include <stdio.h>

struct order {
    const char *name;
    const long *count;
};

static const long few = 3;
static struct order orders[] = {{"none", &few}, {"apples", &few}, {"pears", (const long *)16}};

__attribute__((noinline)) static long total(const struct order *order)
{
    return *order->count + 1;
}

static void *work(void *key)
{
    printf("%ld\n", total(&orders[*(int *)key]));
    return 0;
}

int main(void)
{
    int key = 0;
    pthread_t worker;

    printf("crash: ready\n");
    fflush(stdout);
    if (scanf("%d", &key) != 1)
        return 1;
    pthread_create(&worker, 0, work, &key);
    pthread_join(worker, 0);
    return 0;
}
