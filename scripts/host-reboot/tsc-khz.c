/* Prints how many thousand times a second the time stamp counter counts. A kernel that boots in an emulator measures that
 * badly when the machine is busy; real ones are told by their firmware. */
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <x86intrin.h>

static uint64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC_RAW, &now);
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

/* Both clocks at one instant: the try that took the least time. */
static void both(uint64_t *ns, uint64_t *ticks)
{
	uint64_t best = UINT64_MAX;
	for (int i = 0; i < 100; i++) {
		uint64_t before = __rdtsc(), time = now_ns(), after = __rdtsc();
		if (after - before < best) {
			best = after - before;
			*ns = time;
			*ticks = before + best / 2;
		}
	}
}

int main(void)
{
	uint64_t ns[2], ticks[2];
	struct timespec pause = { 0, 300000000 };
	both(&ns[0], &ticks[0]);
	nanosleep(&pause, 0);
	both(&ns[1], &ticks[1]);
	printf("%.0f\n", (double)(ticks[1] - ticks[0]) * 1e6 / (double)(ns[1] - ns[0]));
	return 0;
}
